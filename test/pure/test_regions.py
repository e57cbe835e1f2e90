"""Regions against the tensor cut by hand, and the laws that planning rests on."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.regions import Box, NotPlanned, Regions, chunk, lengths
from twins_tensor import cells, coordinates, held, placed, regions

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple).filter(lambda s: math.prod(s) <= 32)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def specs(draw):
    sizes, shape = draw(SIZES), draw(SHAPES)
    kinds = [("R",), ("P", "sum"), *(("S", d) for d in range(len(shape)))]
    return tuple(draw(st.sampled_from(kinds)) for _ in sizes), shape, sizes


@st.composite
def ordered_specs(draw):
    """Explicit orders on dims that divide evenly, as given orders and as strided shards."""
    sizes = draw(SIZES)
    shape = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=2)))
    shape = tuple(n * math.prod(sizes) for n in shape)
    placements = tuple(draw(st.sampled_from([("R",), *(("S", d) for d in range(len(shape)))])) for _ in sizes)
    return placements, shape, sizes, tuple(draw(st.permutations(range(len(sizes)))))


def as_strided(placements, sizes, order):
    """The same spec with each shard's earlier cuts by later axes as its split factor."""
    words = []
    for axis, p in enumerate(placements):
        earlier = [a for a in order[: order.index(axis)] if placements[a] == p and a > axis]
        factor = math.prod(sizes[a] for a in earlier)
        words.append(("SS", p[1], factor) if p[0] == "S" and factor > 1 else p)
    return tuple(words)


def elements(found, coordinate):
    """The numbers of the elements of a coordinate's box."""
    return cells(found.box(coordinate), found.shape)


@given(specs())
def test_each_coordinate_holds_what_cutting_by_hand_leaves(spec):
    found = regions(*spec)
    for c in coordinates(spec[2]):
        assert elements(found, c) == held(*spec, c)
        assert found.box(c).elements <= found.most


@given(specs())
def test_boxes_of_different_shards_cover_the_tensor_once(spec):
    found = regions(*spec)
    ranges = [range(n) if a in found.sharded else (0,) for a, n in enumerate(found.sizes)]
    together = [e for c in itertools.product(*ranges) for e in elements(found, c)]
    assert sorted(together) == list(range(math.prod(found.shape)))


@given(ordered_specs())
def test_an_order_of_cuts_and_its_strided_shards_are_one_value(spec):
    placements, shape, sizes, order = spec
    found = regions(placements, shape, sizes, order)
    assert found == regions(as_strided(placements, sizes, order), shape, sizes)
    for c in coordinates(sizes):
        assert elements(found, c) == held(placements, shape, sizes, c, order)
        assert elements(found, c) == held(as_strided(placements, sizes, order), shape, sizes, c)


def test_axes_of_size_one_leave_no_trace():
    plain = regions([("S", 0), ("R",)], (5,), (2, 1))
    for other in [("S", 0), ("P", "max"), ("SS", 0, 3)]:
        assert plain == regions([("S", 0), other], (5,), (2, 1))
    assert plain.free == frozenset() and plain.sharded == {0}


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("parts", range(1, 7))
def test_chunks_follow_each_other_and_never_grow(length, parts):
    found = [chunk(length, parts, i) for i in range(parts)]
    assert [e for s, n in found for e in range(s, s + n)] == list(range(length))
    assert sorted((n for _, n in found), reverse=True) == [n for _, n in found]
    assert lengths(length, (parts,)) == {n for _, n in found}


def test_a_box_meets_another_in_what_both_hold():
    one, other = Box((0, 2), (3, 4)), Box((2, 0), (9, 4))
    assert one.meet(other) == other.meet(one) == Box((2, 2), (1, 2))
    assert one.meet(Box((7, 0), (1, 1))).elements == 0
    assert Box((2, 2), (1, 2)).inside(one) == Box((2, 0), (1, 2))
    assert Box((), ()).elements == 1


def regions_of(placements, shape, sizes, order):
    dims, ops, factors = placed(placements)
    return Regions.of(dims, ops, shape, sizes, order, factors)


@pytest.mark.parametrize(
    ("placements", "shape", "sizes", "order", "words"),
    [
        ([("SS", 0, 2), ("S", 0)], (7,), (2, 2), None, r"dim 0 of length 7 .* unevenly"),
        ([("SS", 0, 2), ("R",)], (8,), (2, 2), None, "which is no product"),
        ([("SS", 0, 3), ("S", 0)], (12,), (2, 2), None, "which is no product"),
        ([("S", 0), ("S", 0)], (6,), (2, 2), [(0, (1, 0))], "unevenly"),
        ([("P", "premul")], (6,), (2,), None, "don't know: premul"),
    ],
)
def test_what_has_no_boxes_is_not_ours(placements, shape, sizes, order, words):
    with pytest.raises(NotPlanned, match=words):
        regions_of(placements, shape, sizes, order)


@pytest.mark.parametrize(
    ("placements", "shape", "sizes", "order", "words"),
    [
        ([("S", 0)], (6,), (2, 2), None, "one placement for each axis: got 1"),
        ([("S", 1)], (6,), (2,), None, "axis 0 shards dim 1 of a tensor with 1 dims"),
        ([("S", -1)], (6,), (2,), None, "axis 0 shards dim -1"),
        ([("P", "sum"), ("P", "max")], (6,), (2, 2), None, "different kinds in one tensor: max, sum"),
        ([("S", 0), ("S", 0)], (8,), (2, 2), [(0, (0,))], "doesn't list the axes"),
    ],
)
def test_a_wrong_spec_is_an_error(placements, shape, sizes, order, words):
    with pytest.raises(ValueError, match=words):
        regions_of(placements, shape, sizes, order)


def test_a_spec_reads_as_one_word_an_axis():
    spec = [("P", "sum"), ("S", 1), ("R",), ("P", "avg")]
    assert str(regions(spec, (4, 4), (2, 2, 2, 2))) == "P·S1·R·P(avg)"
    assert str(regions([("SS", 0, 2), ("S", 0)], (4,), (2, 2))) == "S0#1·S0#0"
