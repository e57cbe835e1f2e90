"""The sizes that guards admit have the plan that was asked for, rounds included; the twin plans each of them."""

import itertools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions
from torch_overlay.distributed.tensor._planner.sizes import guards, shared_plan
from twins_tensor import without_sizes

MESHES = [(8,), (2, 2), (2, 4), (3, 2), (6, 4), (2, 2, 2), (2, 3, 2), (4, 2, 3), (2, 2, 2, 2)]
SPEEDS = st.tuples(st.sampled_from([1e8, 1e9, 1e11]), st.sampled_from([1e-6, 3e-5, 1e-3]))


def admits(found, shape):
    """Whether a tensor of this shape is one of them, all lengths being multiples of the parts that matter."""
    elements = math.prod(shape)
    return found.least <= elements and (found.most is None or elements <= found.most)


@st.composite
def asked(draw):
    """The specs, the mesh, the groups, the cost, the bytes of an element; and the shape, with the dims left open."""
    sizes = draw(st.sampled_from(MESHES))
    axes = range(len(sizes))
    op = draw(st.sampled_from(["sum", "avg", "max"]))
    source, target = (tuple(draw(st.sampled_from([None, 0, 1, op])) for _ in axes) for _ in range(2))
    joint = [group for n in axes for group in itertools.combinations(axes, n + 1) if n]
    groups = draw(st.none() | st.frozensets(st.sampled_from(joint))) if joint else None
    cost = Cost(*draw(SPEEDS), draw(st.sampled_from([1 << 10, 16 << 20])))
    opened = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    lengths = [st.integers(1, 400).map(lambda n: n * math.prod(sizes)), st.integers(1, 3000)]
    shape = tuple(draw(lengths[0] if dim in opened else st.one_of(lengths)) for dim in range(2))
    return (source, target, sizes), groups, cost, draw(st.sampled_from([1, 4, 8])), shape, opened


def ends(change, shape):
    source, target, sizes = change
    for words in (source, target):  # of each axis: replicated, the dim that it shards, or a pending reduction
        dims, ops = zip(*[(w, None) if isinstance(w, int) else (None, w) for w in words])
        yield Regions.of(dims, ops, shape, sizes)


def planned(case, shape):
    change, groups, cost, itemsize, *_ = case
    return without_sizes(shared_plan(*ends(change, shape), itemsize, groups, cost))


# From R·S1 to S1·R on (2, 4), columns of 64: with many elements the senders are spread over a group with more latency,
# and from 2 x 16 MiB on it takes rounds.
FEW = (((None, 1), (1, None), (2, 4)), None, Cost(), 4, (64, 64), (0,))


@example(FEW, 3, [1, 2, 400, 90_000])
@settings(max_examples=3 * settings.default.max_examples)
@given(asked(), st.integers(1, 30), st.lists(st.integers(1, 100_000), max_size=3))
def test_every_size_that_is_admitted_has_the_plan(case, times, more):
    change, groups, cost, itemsize, shape, opened = case
    try:
        found = guards(*ends(change, shape), itemsize, groups, cost)
    except NotPlanned:
        assume(False)
    assume(not any(shape[dim] % found.parts[dim] for dim in opened))  # else none is said to have it
    assert admits(found, shape)
    first, plan = opened[0], planned(case, shape)
    unit = found.parts[first]
    row = math.prod(shape) // shape[first] * unit  # the elements of one unit more
    ends_of_it = [bound // row + n for bound in (found.least, found.most) if bound is not None for n in (-1, 0, 1)]
    count = shape[first] // unit
    for many in {count * times, count // times, *ends_of_it, *more} - {0, -1}:
        other = tuple(many * unit if dim == first else length for dim, length in enumerate(shape))
        assert not admits(found, other) or planned(case, other) == plan, (other, found)


def test_bounds_are_where_the_plan_changes():
    """A row beyond a bound the plan is another one."""
    change, groups, cost, itemsize, *_ = FEW
    few, many = (guards(*ends(change, (rows, 64)), itemsize, groups, cost) for rows in (64, 8192))
    assert few.parts == many.parts == (1, 8) and few.least == 8, "any row, and eighths of columns"
    rows = [bound // 64 + more for bound in (few.most, many.most) for more in (0, 1)]
    assert rows == [1448, 1449, 131071, 131072]  # 46,336 bytes for each of 8 parts, below 2**15.5; and 32 MiB
    plans = [planned(FEW, (n, 64)) for n in (64, *rows)]
    assert plans[0] == plans[1] != plans[2] == plans[3] != plans[4]
    assert [step.rounds for (step,) in plans] == [1, 1, 1, 1, plans[4][0].rounds] and plans[4][0].rounds > 1


ODD = (1e-6, 3847317299)  # a bandwidth with many digits, as measured ones have
# A change, groups, cost, bytes; a shape; and one for which the last bit of equal seconds would decide otherwise.
TIED = [
    ((((0, "sum", 0), (2, 0, None), (2, 2, 2)), (), Cost(*ODD), 2), (56, 8, 456), (545944, 8, 456)),
    (((("sum", 1), (None, None), (3, 3)), None, Cost(0.0, 2854540101), 4), (189, 46), (38714004, 46)),
]


@pytest.mark.parametrize(("case", "shape", "other"), TIED)
def test_plans_that_take_as_long_by_other_terms_have_no_range(case, shape, other):
    """Their seconds differ in the last bit, and for one size in 100,000 so do the twelve digits that are compared."""
    change, groups, cost, itemsize = case
    case = change, None if groups is None else frozenset(groups), cost, itemsize
    found = guards(*ends(change, shape), itemsize, case[1], cost)
    assert admits(found, shape)
    assert not admits(found, other) or planned(case, other) == planned(case, shape)
