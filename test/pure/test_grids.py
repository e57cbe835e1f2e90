"""A grid puts the same elements on the wire, in the same order, as the list of pieces that it stands for."""

import itertools
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.grids import Grid, grids, talkers
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


def test_a_plain_grid_needs_no_copy():
    assert Grid((2, 3, 4), (2, 3, 4), (0, 1, 2)).plain
    assert Grid((2, 1, 4), (2, 1, 4), (1, 0, 2)).plain
    assert not Grid((2, 3, 4), (2, 3, 4), (1, 0, 2)).plain
    assert not Grid((1, 3, 4), (2, 3, 4), (0, 1, 2)).plain
    step = Case((("S", 0), ("S", 0)), (("R",), ("R",)), (8, 4), (2, 2)).steps()[0]
    assert grids(step, step.before.box((0, 0)), step.after.box((0, 0)))[1].plain
