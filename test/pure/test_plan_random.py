"""Plans of random cases, run on all ranks in one process and compared with the whole tensor cut by hand."""

import math
import random
import sys
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.cost import Cost
from twins_tensor import Case

MOVED = ("R", "S")
COSTS = st.sampled_from([Cost(), Cost(latency=1.0), Cost(latency=0.0)])


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    assume(math.prod(sizes) <= 24)
    shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
    assume(math.prod(shape) <= 80)
    return shape, sizes


def placements(shape):
    return st.sampled_from([("R",), *(("S", d) for d in range(len(shape)))])


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
            new = old if old[0] == "P" else ("P", "sum")
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


def test_the_fuzz_command_finds_nothing(capsys):
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    try:
        import fuzz_redistribute
    finally:
        sys.path.pop(0)
    assert fuzz_redistribute.simulate(cases=300, seed=random.Random(7).randrange(10**6)) == 0
    assert "0 wrong, 0 raised" in capsys.readouterr().out
