"""How a plan depends on the size of the tensor: where all dims are multiples of the mesh's size, by its bytes alone.

So one plan serves all shapes with so many bytes, and between two sizes with the same plan there is no other.
"""

import dataclasses
import itertools
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.cost import Cost, arriving, leaving
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Collective, Divide
from twins_tensor import Case

KINDS = [("R",), ("S", 0), ("S", 1), ("P", "sum")]
MESHES = [(2, 2), (4, 2), (8, 8), (2, 2, 2), (2, 3, 2), (3, 4), (2, 2, 2, 2)]
COSTS = [Cost(), Cost(latency=0.0), Cost(latency=1e-3), Cost(latency=1.0)]
FOUND_SMALL = ((("R",), ("S", 0)), (("S", 0), ("R",)), (8, 8), None, Cost())


@st.composite
def questions(draw):
    """Source, target, sizes, groups at hand and costs."""
    sizes = draw(st.sampled_from(MESHES))
    axes = range(len(sizes))
    source = tuple(draw(st.sampled_from(KINDS)) for _ in axes)
    target = tuple(draw(st.sampled_from(KINDS[:3] if old[0] != "P" else KINDS)) for old in source)
    joint = [group for n in axes for group in itertools.combinations(axes, n + 1) if n]
    groups = draw(st.none() | st.sets(st.sampled_from(joint)).map(lambda found: tuple(sorted(found))))
    return source, target, sizes, groups, draw(st.sampled_from(COSTS))


def case(question, by_rows=1, by_columns=1, itemsize=4):
    source, target, sizes, groups, cost = question
    ranks = math.prod(sizes)
    return Case(source, target, (by_rows * ranks, by_columns * ranks), sizes, groups, itemsize=itemsize, cost=cost)


def kinds(plan):
    """What a plan says, but for the shape."""
    return [
        (type(step), step.by)
        if isinstance(step, Divide)
        else (
            type(step),
            step.after.orders,
            step.after.partial,
            getattr(step, "axes", ()),
            getattr(step, "diagonals", ()),
        )
        for step in plan
    ]


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(questions(), st.sampled_from([2, 3, 7, 64, 1000, 4096]))
@example(FOUND_SMALL, 64)
def test_only_the_bytes_decide(question, times):
    plans = [
        case(question, times).steps(),
        case(question, 1, times).steps(),
        case(question, itemsize=4 * times).steps(),
    ]
    assert kinds(plans[0]) == kinds(plans[1]) == kinds(plans[2])


def line(case):
    """The time of a plan as a line: its latency, and the seconds that each byte of an element adds. In one round each,
    as the choice sees them."""
    steps = [
        dataclasses.replace(step, rounds=1) if hasattr(step, "rounds") else step
        for step in case.steps()
        if isinstance(step, Collective)
    ]
    latency = sum(case.cost.seconds(step, 0) for step in steps)
    return latency, sum(case.cost.seconds(step, 1) for step in steps) - latency


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(questions())
@example(FOUND_SMALL)
def test_more_bytes_never_take_a_plan_with_less_latency_and_more_bytes(question):
    """The choice is a lower envelope of lines."""
    lines = [line(case(question, itemsize=4**power)) for power in range(14)]
    for (latency, slope), (more, less) in itertools.pairwise(lines):
        assert more >= latency * (1 - 1e-9) and less <= slope * (1 + 1e-6)


def test_the_examples_do_change_plans():
    """Else the two tests above would hold for any planner that knows one plan."""
    found = [case(FOUND_SMALL, itemsize=4**power).steps()[0] for power in range(10)]
    assert all(isinstance(step, AllToAll) for step in found)
    assert {step.axes for step in found} == {(1,), (0, 1)}
    assert all(max(arriving(step), leaving(step)) > 0 for step in found)
