"""Balanced senders: no rank sends more than it must, by a maximum flow, and what the cost model makes of it."""

import itertools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flow_twin import least_sent
from torch_overlay.distributed.tensor._planner.cost import Cost, leaving
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Collective, Exchange
from twins_tensor import Case, coordinates, gets, held, sends
from width import sample

MOVED = [("R",), ("S", 0), ("S", 1)]
R, S0, P = ("R",), ("S", 0), ("P", "sum")
HEAVY = 1 << 30  # bytes of an element, so that bytes decide


def moves(sizes, shape):
    """Every move with a collective, where bytes decide and all groups are at hand."""
    for source, target in itertools.product(itertools.product(MOVED, repeat=len(sizes)), repeat=2):
        case = Case(source, target, shape, sizes, itemsize=HEAVY)
        if any(isinstance(step, Collective) for step in case.steps()):
            yield case


def ports(case):
    """The elements that the busiest receiver gets, and those that the busiest sender sends, in all collectives."""
    steps = [step for step in case.steps() if isinstance(step, Collective)]
    return tuple(sum(max(count(step, c) for c in coordinates(case.sizes)) for step in steps) for count in (gets, sends))


# --- the twin ---


def demands(case):
    """By the ranks that hold them, how many elements have to be sent to others; and what one rank lacks at most."""
    holders, wanters = {}, {}
    for side, order, found in (
        (case.source, case.source_order, holders),
        (case.target, case.target_order, wanters),
    ):
        for c in coordinates(case.sizes):
            for element in held(side, case.shape, case.sizes, c, order):
                found.setdefault(element, set()).add(c)
    wanted, lacking = {}, dict.fromkeys(coordinates(case.sizes), 0)
    for element, ranks in wanters.items():
        have = frozenset(holders[element])
        wanted[have] = wanted.get(have, 0) + len(ranks - have)
        for rank in ranks - have:
            lacking[rank] += 1
    return wanted, max(lacking.values())


def least_port(case):
    """The fewest elements that the busiest port can get or send, whoever sends."""
    wanted, lacking = demands(case)
    return least_sent(wanted, math.prod(case.sizes), lacking)


@pytest.mark.parametrize(("sizes", "shape"), [((2, 2, 2), (8, 8)), ((4, 4), (16, 16))])
def test_no_move_has_a_busier_port_than_it_must(sizes, shape):
    """Within 10 %, says the promise; it is exact."""
    for case in sample(moves(sizes, shape), 3):
        assert max(ports(case)) == least_port(case), case


@st.composite
def exchanges(draw):
    """Every all-to-all, planned or not: any boxes, any group over at least the axes that it needs."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), min_size=2, max_size=4).map(tuple))
    assume(math.prod(sizes) <= 48)
    shape = tuple(draw(st.lists(st.sampled_from([1, 3, 4, 5, 6, 8, 12, 24]), min_size=1, max_size=2)))
    kinds = [("R",), ("P", "sum"), *[("S", dim) for dim in range(len(shape))]]
    source = tuple(draw(st.sampled_from(kinds)) for _ in sizes)
    target = tuple(draw(st.sampled_from([kind for kind in kinds if kind != P])) for _ in sizes)
    return Case(source, target, shape, sizes, cost=Cost(latency=0.0))


@settings(deadline=None)
@given(exchanges())
@example(Case((R, S0), (S0, R), (4, 6), (2, 3)))  # two coordinates of the shard axis share one on the replica axis
def test_no_rank_sends_more_than_said(case):
    """With whatever cuts: even, uneven, of other primes; for the plan and for all groups that could be taken."""
    before, after = case.ends()
    reduced = tuple(sorted(before.pending))
    assert case.problem() is None
    for more in itertools.product((False, True), repeat=len(case.sizes)):
        free = [axis for axis in before.free & after.sharded if more[axis]]
        axes = tuple(sorted({*before.sharded, *reduced, *free}))
        exchange = Exchange(before, after, axes, reduced)
        step = AllToAll(before, after, axes, "sum" if reduced else None, reduced, exchange.diagonals())
        sent = [sends(step, c) for c in coordinates(case.sizes)]
        assert max(sent) <= leaving(step)
        assert sum(sent) == sum(gets(step, c) for c in coordinates(case.sizes))
