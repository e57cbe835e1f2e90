"""Tensors share the plan of a form: which plan one has follows from its own sizes, and it is right and good for it."""

import itertools
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner import search as planner_plan
from torch_overlay.distributed.tensor._planner import sizes as planner_forms
from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.regions import NotPlanned
from torch_overlay.distributed.tensor._planner.search import plan, plan_at_once
from torch_overlay.distributed.tensor._planner.sizes import shared_plan
from twins_tensor import Case

R, P = ("R",), ("P", "sum")
MESHES = [(2,), (4,), (2, 2), (4, 2), (2, 3), (8, 8), (2, 2, 2), (2, 2, 4), (2, 3, 2)]


LENGTHS = [1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 80, 96, 144, 1000, 4096]


@pytest.fixture(autouse=True)
def nothing_known():
    planner_forms._forms.cache_clear()
    yield
    planner_forms._forms.cache_clear()


@st.composite
def histories(draw):
    """Source, target, sizes of the mesh and groups at hand; and tensors of up to three dims, with the bytes of an
    element, in the order in which they come."""
    sizes, ndim = draw(st.sampled_from(MESHES)), draw(st.integers(1, 3))
    axes, shards = range(len(sizes)), [("S", dim) for dim in range(ndim)]
    source, target = (tuple(draw(st.sampled_from([R, P, *shards])) for _ in axes) for _ in range(2))
    joint = [group for n in axes for group in itertools.combinations(axes, n + 1) if n]
    groups = draw(st.sets(st.sampled_from(joint))) if joint else set()
    length = st.sampled_from(LENGTHS)
    tensors = st.tuples(st.tuples(*[length] * ndim), st.sampled_from([1, 4, 16, 1 << 20]))
    return source, target, sizes, tuple(sorted(groups)), draw(st.lists(tensors, min_size=3, max_size=8))


def asked(history):
    """The plans for the tensors of a history, in their order."""
    source, target, sizes, groups, tensors = history
    for shape, itemsize in tensors:
        ends = Case(source, target, shape, sizes, groups).ends()
        yield ends, itemsize, shared_plan(*ends, itemsize, frozenset(groups), Cost())


# The chosen plan leaves a dim alone that others would have cut, evenly for one size and unevenly for another.
UNCUT = ((("S", 0), P, P), (R, R, ("S", 0)), (2, 2, 4), ((0, 1, 2),))
UNCUT_TENSORS = [((80, 6, 32), 4), ((80, 6, 64), 4), ((80, 16, 32), 4)]
# Terms are made first on small and on large tensors, and last on those between.
MADE = ((P, ("S", 0)), (("S", 0), P), (2, 3), ((0, 1),))


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(histories())
@example((*UNCUT, UNCUT_TENSORS))
@example((*UNCUT, [((80, n, m), 4) for n in (6, 16, 32) for m in (32, 64, 6, 16)]))
@example((*MADE, [((6,), 4), ((6000,), 1 << 20), ((6,), 1 << 20)]))
def test_the_sizes_that_were_asked_for_before_dont_change_a_plan(history):
    try:
        together = list(asked(history))
    except NotPlanned:
        return
    *question, tensors = history
    for (_, _, steps), tensor in zip(together, tensors, strict=True):
        planner_forms._forms.cache_clear()
        assert [steps] == [alone for _, _, alone in asked((*question, [tensor]))]


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(histories())
@example((*UNCUT, UNCUT_TENSORS))
def test_a_shared_plan_takes_hardly_longer_than_the_best_for_the_size(history):
    """Twice the bytes at most lie between two powers of two, so a plan is chosen for 0.7 to 1.4 of a tensor's bytes."""
    groups = frozenset(history[3])
    try:
        for ends, itemsize, steps in asked(history):
            best = plan(*ends, itemsize, groups, Cost())
            shared, least = (sum(Cost().seconds(step, itemsize) for step in found) for found in (steps, best))
            assert shared <= 1.42 * least
            assert collectives(steps) <= collectives(best)
    except NotPlanned:
        return


def counted(shapes, source=(("S", 0), R), target=(R, ("S", 0)), sizes=(8, 8), groups=((0, 1),)):
    """How many plans are made for tensors of these shapes, in turn."""
    planner_forms._forms.cache_clear()
    history = (source, target, sizes, groups, [(shape, 4) for shape in shapes])
    made = mock.Mock(wraps=plan_at_once)  # shared or not
    with mock.patch.object(planner_plan, "plan_at_once", made), mock.patch.object(planner_forms, "plan_at_once", made):
        assert len(list(asked(history))) == len(shapes)
    return made.call_count


def test_one_plan_serves_all_sizes_near_a_power_of_two():
    assert counted([(64, 12), (64, 16), (128, 8), (64, 22), (192, 5)]) == 1
    assert counted([(64, 11), (64, 23)]) == 2, "half and twice as many bytes"
    assert counted([(65, 8), (66, 8), (65, 8)]) == 3, "uneven cuts are planned each by themselves"
    assert counted([(0, 8), (64, 0)]) == 2, "of no elements, too"


def test_a_shared_plan_has_the_rounds_of_its_own_size():
    """40 and 44 MB: nearest to the same power of two, which alone would take one round."""
    ends = ((("S", 0),) * 3, (R, R, ("S", 1)))
    for length in (40, 44, 48, 92):
        before, after = Case(*ends, (length << 10, 256), (2, 2, 2)).ends()
        found = shared_plan(before, after, 4)
        assert found == plan(before, after, 4) and len(found) == 1, length
        assert found[0].rounds > 1
