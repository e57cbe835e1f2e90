"""A plan taken over from other sizes is the plan that would have been made, whatever sizes were asked for before."""

import itertools
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner import forms
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.forms import plan_like_others
from torch_overlay.distributed.tensor._planner.plan import plan
from twins_tensor import Case

R, P = ("R",), ("P", "sum")
MESHES = [(2,), (4,), (2, 2), (4, 2), (2, 3), (8, 8), (2, 2, 2), (2, 2, 4), (2, 3, 2)]
LENGTHS = [1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 80, 96, 144, 1000, 4096]


@st.composite
def histories(draw):
    """Source, target, sizes of the mesh and groups at hand; and tensors of up to three dims, with the bytes of an
    element, in the order in which they come."""
    sizes, ndim = draw(st.sampled_from(MESHES)), draw(st.integers(1, 3))
    axes, shards = range(len(sizes)), [("S", dim) for dim in range(ndim)]
    source = tuple(draw(st.sampled_from([R, P, *shards])) for _ in axes)
    target = tuple(draw(st.sampled_from([R, *shards])) for _ in axes)
    joint = [group for n in axes for group in itertools.combinations(axes, n + 1) if n]
    groups = draw(st.sets(st.sampled_from(joint))) if joint else set()
    length = st.sampled_from(LENGTHS)
    tensors = st.tuples(st.tuples(*[length] * ndim), st.sampled_from([1, 4, 16, 1 << 20]))
    return source, target, sizes, tuple(sorted(groups)), draw(st.lists(tensors, min_size=3, max_size=8))


# The chosen plan leaves a dim alone that others would have cut, evenly for one size and unevenly for another.
UNCUT = ((("S", 0), P, P), (R, R, ("S", 0)), (2, 2, 4), ((0, 1, 2),))
UNCUT_TENSORS = [((80, 6, 32), 4), ((80, 6, 64), 4), ((80, 16, 32), 4)]


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(histories())
@example((*UNCUT, UNCUT_TENSORS))
@example((*UNCUT, [((80, n, m), 4) for n in (6, 16, 32) for m in (32, 64, 6, 16)]))
def test_any_history_of_sizes_gives_the_plans_that_are_made_alone(history):
    forms._known.cache_clear()
    source, target, sizes, groups, tensors = history
    for shape, itemsize in tensors:
        ends = Case(source, target, shape, sizes, groups).ends()
        assert plan_like_others(*ends, itemsize, frozenset(groups), Cost()) == plan(*ends, itemsize, groups, Cost())


@pytest.fixture
def nothing_known():
    forms._known.cache_clear()
    yield
    forms._known.cache_clear()


def counted(shapes, itemsize=4):
    """How many plans are made for a move to these shapes, in turn."""
    forms._known.cache_clear()
    ends = [Case((("S", 0), R), (R, ("S", 0)), shape, (8, 8), ((0, 1),)).ends() for shape in shapes]
    with mock.patch.object(forms, "plan", wraps=plan) as planned:
        for end in ends:
            plan_like_others(*end, itemsize, frozenset({(0, 1)}), Cost())
    return planned.call_count


def test_four_plans_serve_all_sizes_of_a_form(nothing_known):
    """Small and large tensors take other plans here."""
    sizes = [(64, 8), (64, 9)]
    assert counted(sizes) == 4, "the first two, the smallest, and the largest, which has another plan"
    assert counted([*sizes, (64, 8), (128, 3), (64, 1)]) == 4
    assert counted([*sizes, (65, 8), (66, 8)]) == 4 + 2, "uneven cuts are planned each by themselves"


def test_large_tensors_get_the_plan_of_large_ones(nothing_known):
    small, large = [(64, 8), (64, 9)], [(64, 1 << 20), (64, 1 << 21), (64, 1 << 22)]
    assert counted([*small, *large]) == 4 + 4, "the two ends of the other form; the small end has the first one"
