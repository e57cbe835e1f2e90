"""Plans of all pairs and of random cases, run on all ranks in one process, against the whole tensor cut by hand."""

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.steps import Collective, Divide
from twins_tensor import Case
from width import NIGHTLY, sample

COSTS = st.sampled_from([Cost(), Cost(latency=1.0), Cost(latency=0.0)])
R, S0, S1, P, A = ("R",), ("S", 0), ("S", 1), ("P", "sum"), ("P", "avg")


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    assume(math.prod(sizes) <= 24)
    shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
    assume(math.prod(shape) <= 80)
    return shape, sizes


def placements(shape):
    return st.sampled_from([R, *(("S", d) for d in range(len(shape)))])


def groups(axes):
    """Every set of groups, in any spelling; None is all of them."""
    group = st.sets(st.integers(0, axes - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    return st.none() | st.sets(group).map(tuple)


@st.composite
def moves(draw):
    shape, sizes = draw(meshes())
    source, target = (tuple(draw(placements(shape)) for _ in sizes) for _ in range(2))
    return Case(source, target, shape, sizes, draw(groups(len(sizes))), cost=draw(COSTS))


@st.composite
def reductions(draw):
    """Some axes end a reduction, some keep one, some begin one, the rest move."""
    shape, sizes = draw(meshes())
    ops = draw(st.sampled_from([("sum",), ("avg",), ("sum", "avg"), ("max",), ("product",), ("bxor",)]))
    pairs = []
    for _ in sizes:
        old = draw(st.sampled_from(ops).map(lambda op: ("P", op)) | placements(shape))
        new = draw(placements(shape))
        if draw(st.booleans()) and (old[0] == "P" or set(ops) <= {"sum", "avg"}):
            new = old if old[0] == "P" else P
        pairs.append((old, new))
    source, target = zip(*pairs)
    return Case(source, target, shape, sizes, draw(groups(len(sizes))), cost=draw(COSTS))


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(moves())
def test_a_move_brings_every_rank_its_box_and_nothing_twice(case):
    assert case.problem() is None


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(reductions())
def test_a_reduction_takes_every_term_once(case):
    assert case.problem() is None


@pytest.mark.parametrize("first", range(4 if NIGHTLY else 1))
def test_every_pair_is_right_with_some_groups(first):
    """By day a fifth of the pairs, each with one of the 16 sets of joint groups; at night all, with four."""
    joint = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    sets = [some for n in range(5) for some in itertools.combinations(joint, n)]
    pairs = itertools.product(itertools.product((R, S0, S1, P), repeat=3), itertools.product((R, S0, S1), repeat=3))
    for number, pair in sample(enumerate(pairs), 5, first):
        case = Case(*pair, [(4, 2), (5, 3)][number % 2], (2, 2, 2), sets[(5 * number + 4 * first) % len(sets)])
        assert case.problem() is None, case


def test_sums_and_averages_are_reduced_together_and_divided_first():
    """Else a sum of fp16 overflows."""
    divide, reduce = Case((P, A), (R, R), (8, 4), (2, 3)).steps()
    assert (reduce.axes, reduce.op, divide) == ((0, 1), "sum", Divide(3))
    assert [step.op for step in Case((A, A), (R, R), (8, 4), (2, 2)).steps()] == ["avg"]
    divide, exchange = Case((R, S0, A), (R, S1, S0), (8, 8), (2, 2, 2)).steps()
    assert (divide, exchange.op) == (Divide(2), "sum")


def test_a_reduction_goes_by_the_group_of_all_that_talks():
    """Neither the pending axes nor those that move have a group of their own, but both together have."""
    for ends in (((P, P, S0), (R, R, R)), ((S0, P, P), (R, R, S1)), ((P, S0, P), (S0, R, R)), ((P, P, P), (S0, R, R))):
        found, apart = (Case(*ends, (8, 8), (2, 2, 2), groups) for groups in (((0, 1, 2),), ()))
        assert found.problem() is None
        assert collectives(found.steps()) == 2 < collectives(apart.steps())


def test_a_shared_cut_that_stays_put_is_not_crossed():
    """S·S·R to R·S·S on one dim, cut 2 x 2 and again: the middle axis is where the piece is, before and after."""
    found = Case((S0, S0, R), (R, S0, S0), (8,), (2, 2, 2), None, None, (2, 1, 0))
    assert found.problem() is None
    assert [s.axes for s in found.steps() if isinstance(s, Collective)] == [(0,)]


def test_the_fuzz_command_finds_nothing(capsys):
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    try:
        import fuzz_redistribute
    finally:
        sys.path.pop(0)
    assert fuzz_redistribute.simulate(cases=300, seed=random.Random(7).randrange(10**6)) == 0
    assert "0 wrong, 0 raised" in capsys.readouterr().out
