"""Rounds: their parts make up the piece, no round holds more than the rank has, and none is too small."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.cost import Cost, arriving, leaving
from torch_overlay.distributed.tensor._planner.plan import parts
from torch_overlay.distributed.tensor._planner.steps import AllToAll, ReduceScatter
from twins_tensor import Case

MB = 1 << 20
KINDS = (("R",), ("S", 0), ("S", 1), ("P", "sum"))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 12))
@settings(deadline=None)
def test_each_element_is_in_one_round(length, rounds):
    found = [
        place
        for box in parts(length, rounds)
        for place in itertools.product(*[range(start, start + n) for start, n in zip(box.start, box.length)])
    ]
    assert sorted(found) == list(itertools.product(*map(range, length)))
    assert len(parts(length, rounds)) == rounds


def planned(shape, cost):
    for source, target in itertools.product(itertools.product(KINDS, repeat=3), itertools.product(KINDS[:3], repeat=3)):
        yield from Case(source, target, shape, (2, 2, 2), itemsize=4, cost=cost).steps()


@pytest.mark.parametrize(("rows", "some"), [(1 << 12, 0), (1 << 14, 486)])
def test_what_a_round_holds(rows, some):
    """Never more than the rank held before; unless a round would be too small, as with 16 MB, where there are none."""
    found = 0
    for step in planned((rows, 1 << 10), Cost()):
        if isinstance(step, AllToAll) and len(step.axes) > 1:
            staged = arriving(step) + leaving(step)
            assert step.rounds == 1 or staged * 4 >= step.rounds * 8 * MB
            assert staged <= step.rounds * step.before.most or staged * 4 < (step.rounds + 1) * 16 * MB
            found += step.rounds > 1
    assert found == some


def test_along_one_axis_or_as_torch_spells_it_there_is_one():
    for step in planned((1 << 14, 1 << 12), Cost(round_bytes=1)):
        if len(getattr(step, "axes", ())) == 1:
            assert getattr(step, "rounds", 1) == 1
    scattered = Case((("P", "sum"),) * 3, (("S", 0),) * 3, (1 << 14, 1 << 12), (2, 2, 2), itemsize=4).steps()
    assert [step.rounds for step in scattered] == [1]
    odd = Case((("P", "sum"),) * 3, (("S", 0), ("S", 0), ("S", 1)), (1 << 14, 1 << 12), (2, 2, 2), itemsize=4).steps()
    assert [(type(step), step.rounds) for step in odd] == [(ReduceScatter, 4)]


def test_more_bytes_never_have_fewer_rounds():
    ends = (("S", 0),) * 3, (("R",), ("R",), ("S", 1))
    cases = [Case(*ends, (rows, 1 << 12), (2, 2, 2), itemsize=4) for rows in (1 << 10, 1 << 11, 1 << 12, 1 << 14)]
    assert [step.rounds for case in cases for step in case.steps()] == [1, 1, 4, 8]
