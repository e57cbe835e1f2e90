"""The least that the busiest rank can send, whoever sends what: by maximum flows from ranks to those who lack what
they hold."""

import networkx


def least_sent(wanted, world, least=0):
    """The fewest units that the busiest of `world` ranks can send, and no fewer than `least`.

    `wanted` says how many units go out of what just these ranks hold.
    """
    low, high = max(least, -(-sum(wanted.values()) // world)), sum(wanted.values())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(wanted, middle) else (middle + 1, high)
    return low


def _enough(wanted, port):
    """Whether everything can be sent if no rank sends more than `port` units."""
    graph = networkx.DiGraph()
    for ranks, units in wanted.items():
        graph.add_edge(ranks, "all", capacity=units)
        for rank in ranks:
            graph.add_edge("nothing", rank, capacity=port)
            graph.add_edge(rank, ranks)
    return networkx.maximum_flow_value(graph, "nothing", "all") == sum(wanted.values())
