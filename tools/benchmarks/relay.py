"""Each element leaves the trainers once: a `Transfer` with `relay` beside one without.

On 8 gloo ranks, without the overlay: 25 tensors of 4 MB from ranks 0 and 1, cut by rows, to replicas on the other six.
Both run in the same processes, in turns; every result is checked. The last rows have what ranks send: by the plans,
for 1, 2, 4 and 8 replicas of a server of two ranks, which need no processes.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from . import process
from .clock import seconds_of_all_ranks, summed
from .report import Report, Row, Target
from .sides import in_turns

if TYPE_CHECKING:
    from collections.abc import Callable

DIRECT, RELAY = "without relay", "relay=True"
TRAINERS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=25, metavar="N", help="of 4 MB each")
    parser.add_argument("--rounds", type=int, default=5, help="of two turns, there and back through the ways")


def run(arguments: argparse.Namespace, report: Report) -> None:
    print(f"relay: {arguments.tensors} tensors of 4 MB, 8 gloo ranks", file=sys.stderr)
    found = process.ranks("relay:measure", 8, tensors=arguments.tensors, rounds=arguments.rounds)
    for what in ("wall", "cpu"):
        report.rows.append(Row(what, "s", found[DIRECT][what], found[RELAY][what]))
    for what in ("out of the trainers", "out of the busiest rank"):
        report.rows.append(Row(what, "B", found[DIRECT][what], found[RELAY][what]))
    report.facts["relay"] = found
    report.notes.append("stock is a Transfer without relay; the least of all turns")
    report.targets.append(Target("wrong results", found["wrong"], 0))
    report.targets.append(Target("wall", found[RELAY]["wall"] / found[DIRECT]["wall"], 1.0))
    report.targets.append(Target("bytes out of the trainers", found[RELAY]["out of the trainers"] / found["size"], 1.0))
    for replicas in (1, 2, 4, 8):
        out, even = planned(replicas)
        report.targets.append(Target(f"{replicas} replicas: bytes out of the trainers", out, 1.0))
        report.targets.append(Target(f"{replicas} replicas: the busiest of its side", even, 1.15))


def planned(replicas: int) -> tuple[float, float]:
    """By the plans of a transformer's tensors: the bytes out of two trainers over those that are wanted, and the most
    that a rank sends over the mean of its side."""
    from torch_overlay.distributed.tensor._planner.regions import Regions
    from torch_overlay.transfers._planner.piece_moves import OnMesh, Pieced, PieceMove
    from torch_overlay.transfers._planner.relay import Relay, Turns
    from torch_overlay.transfers._planner.schedule import Schedule
    from torch_overlay.transfers._planner.sides import Ranks, Side

    servers, sizes, turns = range(TRAINERS, TRAINERS + 2 * replicas), (replicas, 2), Turns()
    hops: list[list[PieceMove]] = [[], []]
    wanted = 0
    shapes = [
        ((1024, 1024), 0),
        ((256, 1024), 0),
        ((1024, 1024), 1),
        ((2816, 1024), 0),
        ((1024, 2816), 1),
        ((1024,), None),
    ]
    for _ in range(8):
        for shape, cut in shapes:
            orders = tuple([(1,) if dim == cut else () for dim in range(len(shape))])
            rows = tuple([(0,) if dim == 0 else () for dim in range(len(shape))])
            source = OnMesh(Side(Regions(shape, (TRAINERS,), rows, (None,)), Ranks.of(range(TRAINERS), (TRAINERS,))))
            target = OnMesh(Side(Regions(shape, sizes, orders, (None, None)), Ranks.of(servers, sizes)))
            wanted += 2 * source.held(0)[0][1].elements * TRAINERS
            turn = turns.next(target, 2)
            if turn is None:
                hops[0].append(PieceMove(Pieced(shape, source, target), (0, 0), 2, ()))
                continue
            relay = Relay.of(shape, (source, target), 2, turn, False, {})
            for hop, pieces in zip(hops, (Pieced(shape, source, relay.first), *relay.hops)):
                hop.append(PieceMove(pieces, (0, 0), 2, ()))
    sent = {rank: sum([Schedule.of(hop, rank).sent for hop in hops]) for rank in (*range(TRAINERS), *servers)}
    most = 0.0
    for side in (range(TRAINERS), servers):
        out = [sent[rank] for rank in side]
        most = max(most, max(out) * len(out) / sum(out) if any(out) else 0.0)
    return sum([sent[rank] for rank in range(TRAINERS)]) / wanted, most


# --- on every rank


def measure(rank: int, size: int, port: int, tensors: int, rounds: int) -> dict[str, Any]:
    """Times, bytes and checks, as rank 0 sees them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_overlay

    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    train = DeviceMesh("cpu", [*range(TRAINERS)])
    whole = (torch.arange(tensors * (1 << 20)) % 65521).float().view(tensors, 1024, 1024)
    source = [distribute_tensor(each, train, [Shard(0)], src_data_rank=None) for each in whole]
    targets = [[torch.zeros_like(each) for each in whole] for _ in range(2)]
    trains = rank < TRAINERS
    ways, found = (DIRECT, RELAY), dict[str, Any](size=whole.nbytes, wrong=0)
    syncs = {}
    for way, target in zip(ways, targets):
        given = (source, None) if trains else (None, target)
        syncs[way] = sync = torch_overlay.Transfer(*given, keep=True, relay=way == RELAY)
        sync.run()
        out = [sync.traffic[each][0] for each in range(size)]
        found[way] = {"out of the trainers": sum(out[:TRAINERS]), "out of the busiest rank": max(out)}
        wrong = 0 if trains else sum([not torch.equal(one, other) for one, other in zip(target, whole)])
        found["wrong"] += int(summed(wrong))
    turn: Callable[[str], dict[str, float]] = lambda way: seconds_of_all_ranks(syncs[way].run)  # noqa: E731
    for way, turns in in_turns(turn, rounds, ways).items():
        found[way] |= {clock: min(each[clock] for each in turns) for clock in ("wall", "cpu")}
    dist.destroy_process_group()
    return found
