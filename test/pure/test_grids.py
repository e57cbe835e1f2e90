"""A grid puts the same elements on the wire, in the same order, as the list of pieces that it stands for."""

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.grids import Grid, grids, talkers
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllReduce, AllToAll, Collective
from twins_tensor import Case, cells, coordinates


def permuted(grid, flat):
    """What the grid makes of a flat list."""
    assert len(flat) == math.prod(grid.lengths)
    strides = [math.prod(grid.lengths[i + 1 :]) * (grid.lengths[i] > 1) for i in range(len(grid.lengths))]
    assert all(n in (1, m) for n, m in zip(grid.lengths, grid.expanded, strict=True))
    ranges = [range(grid.expanded[i]) for i in grid.order]
    return [flat[sum(p * strides[i] for p, i in zip(place, grid.order))] for place in itertools.product(*ranges)]


def packed(pieces, lengths):
    return [i for piece in pieces for i in cells(piece.box, lengths)]


def unpacked(pieces, lengths):
    """Where each element of the wire is in the new tensor, turned round: the wire's place of each element, of all
    first terms, then of all second ones, and so on."""
    places = {cell: [] for cell in range(math.prod(lengths))}
    for i, cell in enumerate(packed(pieces, lengths)):
        places[cell].append(i)
    return [i for terms in zip(*places.values(), strict=True) for i in terms]


def check(step, coordinate):
    """How many grids the step has at a coordinate; each must agree with the pieces."""
    found = 0
    boxes = step.before.box(coordinate), step.after.box(coordinate)
    held, wanted = (box.length for box in boxes)
    pack, unpack = grids(step, *boxes) if not isinstance(step, AllReduce) else (None, None)
    if grid := pack:
        pieces = step.sends(coordinate) if isinstance(step, AllToAll) else step.pieces(coordinate)
        assert permuted(grid, list(range(math.prod(held)))) == packed(pieces, held)
        found += 1
    if pack and isinstance(step, AllToAll):
        for pieces in (step.sends(coordinate), step.receives(coordinate)):
            members = [piece.member for piece in pieces]
            assert [number for number, talks in enumerate(talkers(step, coordinate)) if talks] == members
    if grid := unpack:
        pieces = step.receives(coordinate) if isinstance(step, AllToAll) else step.pieces(coordinate)
        assert permuted(grid, list(range(math.prod(grid.lengths)))) == unpacked(pieces, wanted)
        found += 1
    return found


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    total = math.prod(sizes)
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, total, 2 * total]), min_size=1, max_size=2)))
    assume(math.prod(shape) <= 300)
    kinds = st.sampled_from([("R",), ("P", "sum"), *(("S", d) for d in range(len(shape)))])
    source = tuple(draw(kinds) for _ in sizes)
    target = tuple(draw(kinds.filter(lambda p: p[0] != "P")) for _ in sizes)
    return Case(source, target, shape, sizes)


@settings(max_examples=2 * settings.default.max_examples)
@given(cases())
def test_a_grid_says_what_the_pieces_say(case):
    for step in case.steps():
        if isinstance(step, Collective):
            for c in coordinates(case.sizes):
                check(step, c)


@pytest.mark.parametrize(
    ("source", "target", "shape", "count"),
    [
        ("S0 S0", "R R", (8, 4), 1),
        ("R S1", "R R", (8, 4), 1),
        ("S1 S0", "R R", (8, 4), 1),
        ("S0 S1", "S1 S0", (8, 4), 0),  # the cuts part on both dims: no two ranks exchange alike
        ("S0 S0", "S1 S1", (8, 4), 2),
        ("S0 R", "S1 R", (8, 4), 2),
        ("S0 R", "S1 R", (7, 4), 0),
        ("S0 S0", "R S1", (8, 4), 2),  # two of the four want the same
        ("S0 S0", "S1 R", (8, 4), 2),
        ("S0 S1", "R S1", (8, 4), 1),
        ("P P", "S1 S0", (8, 4), 1),
        ("P R", "S0 S1", (8, 4), 1),
        ("P S0", "S1 S0", (9, 3), 0),
    ],
)
def test_even_steps_have_grids(source, target, shape, count):
    def read(words):
        return tuple(("P", "sum") if w == "P" else ("R",) if w == "R" else ("S", int(w[1])) for w in words.split())

    steps = Case(read(source), read(target), shape, (2, 2)).steps()
    step, *_ = [s for s in steps if isinstance(s, Collective) and not isinstance(s, AllReduce)]
    assert {check(step, c) for c in coordinates((2, 2))} == {count}


@pytest.mark.parametrize(
    ("source", "target", "shape", "count"),
    [
        ("R S0 P", "R S1 S1", (4, 8), 2),  # the terms of one axis, and the cut of another goes
        ("P P S1", "S0 S0 S0", (16, 4), 2),
        ("P S0 P", "R R S1", (8, 4), 2),  # two of the four want the same
        ("P S0 S0", "S1 S0 R", (8, 6), 2),  # axis 1 takes no part
        ("R S0 S0", "R R S0", (8, 6), 0),
        ("P S0 P", "S0 R S1", (8, 4), 0),  # the cuts of dim 0 part
        ("P S0 P", "R R S1", (8, 3), 0),
        ("R P R", "S0 R R", (8, 3), 0),  # axis 0 cuts what a rank sends
        ("S1 P S0", "S1 S0 R", (8, 5), 0),
    ],
)
def test_reductions_and_axes_that_take_no_part(source, target, shape, count):
    """By the group over all axes."""
    sizes = (2, 2, 2)
    before, after = (Regions.of(*_read(words), shape, sizes) for words in (source, target))
    ended = tuple(sorted(before.pending - after.pending))
    step = AllToAll(before, after, (0, 1, 2), "sum" if ended else None, ended)
    assert {check(step, c) for c in coordinates(sizes)} == {count}


def _read(words):
    dims = [int(word[1]) if word[0] == "S" else None for word in words.split()]
    return dims, ["sum" if word == "P" else None for word in words.split()]


def test_where_not_all_members_exchange_there_is_no_grid():
    """The third axis is a replica, and there only because there is no other group."""
    ends = (("S", 0), ("S", 0), ("R",)), (("S", 1),) * 3
    step, *_ = [s for s in Case(*ends, (16, 16), (2, 2, 2), ((0, 1, 2),)).steps() if isinstance(s, Collective)]
    assert step.axes == (0, 1, 2) and not step.exchange.shards.issuperset(step.axes)
    assert {check(step, c) for c in coordinates((2, 2, 2))} == {0}


def test_a_plain_grid_needs_no_copy():
    assert Grid((2, 3, 4), (2, 3, 4), (0, 1, 2)).plain
    assert Grid((2, 1, 4), (2, 1, 4), (1, 0, 2)).plain
    assert not Grid((2, 3, 4), (2, 3, 4), (1, 0, 2)).plain
    assert not Grid((1, 3, 4), (2, 3, 4), (0, 1, 2)).plain
    step = Case((("S", 0), ("S", 0)), (("R",), ("R",)), (8, 4), (2, 2)).steps()[0]
    assert grids(step, step.before.box((0, 0)), step.after.box((0, 0)))[1].plain
