"""A plan taken over from other sizes is the plan that would have been made, whatever sizes were asked for before."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test_plan_sizes import questions
from torch_overlay.distributed.tensor._planner import forms
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.forms import plan_like_others
from torch_overlay.distributed.tensor._planner.plan import plan
from twins_tensor import Case

LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 8, 12, 16, 24, 48, 64, 96, 144, 1000, 4096])
TENSORS = st.lists(st.tuples(LENGTHS, LENGTHS, st.sampled_from([1, 4, 16, 1 << 20])), min_size=3, max_size=8)


@pytest.fixture(autouse=True)
def nothing_known():
    forms._known.cache_clear()
    yield
    forms._known.cache_clear()


def ends(question, shape):
    source, target, sizes, groups, cost = question
    return Case(source, target, shape, sizes, groups, cost=cost).ends()


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(questions(), TENSORS)
def test_any_history_of_sizes_gives_the_plans_that_are_made_alone(question, tensors):
    forms._known.cache_clear()
    *_, groups, cost = question
    groups = frozenset(groups or ())
    for *shape, itemsize in tensors:
        before, after = ends(question, tuple(shape))
        assert plan_like_others(before, after, itemsize, groups, cost) == plan(before, after, itemsize, groups, cost)


def counted(shapes, itemsize=4):
    """How many plans are made for a move to these shapes, in turn."""
    groups = frozenset({(0, 1)})
    question = ((("S", 0), ("R",)), (("R",), ("S", 0)), (8, 8), groups, Cost())  # small and large take other plans
    with mock.patch.object(forms, "plan", wraps=plan) as planned:
        for shape in shapes:
            plan_like_others(*ends(question, shape), itemsize, groups, Cost())
    return planned.call_count


def test_four_plans_serve_all_sizes_of_a_form():
    sizes = [(64, 8), (64, 9)]
    made = counted(sizes)
    assert made == 4, "the first two, the smallest, and the largest, which has another plan"
    forms._known.cache_clear()
    assert counted([*sizes, (64, 8), (128, 3), (64, 1)]) == made
    forms._known.cache_clear()
    assert counted([*sizes, (65, 8), (66, 8)]) == made + 2, "uneven cuts are planned each by themselves"


def test_large_tensors_get_the_plan_of_large_ones():
    small, large = [(64, 8), (64, 9)], [(64, 1 << 20), (64, 1 << 21), (64, 1 << 22)]
    assert counted([*small, *large]) == 4 + 4, "the two ends of the other form; the small end has the first one"
