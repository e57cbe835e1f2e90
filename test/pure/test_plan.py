"""What plans promise, case by case: the conventions for pending values, groups that are missing, costs, the line."""

import pytest

from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.plan import line
from torch_overlay.distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Divide,
    Narrow,
    ReduceScatter,
)
from twins_tensor import Case

OPS = {"P": "sum", "A": "avg", "X": "max", "M": "product"}


def case(words, shape=(8, 4), sizes=(2, 2), **more):
    """`P S0 > R R` as a case: one word an axis, P a pending sum, A average, X maximum, M product."""
    source, target = words.split(">")

    def read(side):
        return tuple(("R",) if w == "R" else ("S", int(w[1])) if w[0] == "S" else ("P", OPS[w]) for w in side.split())

    return Case(read(source), read(target), shape, sizes, **more)


def shown(words, **more):
    found = case(words, **more)
    assert found.problem() is None
    return line(*found.ends(), found.steps(), found.itemsize).split(": ")[1]


def kinds(words, **more):
    """The types of the steps, after the case was run."""
    found = case(words, **more)
    assert found.problem() is None
    return [type(step) for step in found.steps()]


# --- pending values: torch's conventions ---


def test_sums_and_averages_reduce_together_and_are_divided_once():
    divide, reduce = case("P A > R R", sizes=(2, 3)).steps()  # divided first: fp16 overflows later
    assert (reduce.axes, reduce.op, divide) == ((0, 1), "sum", Divide(3))
    assert case("P A > R R", sizes=(2, 3)).problem() is None
    assert [step.op for step in case("A A > R R").steps()] == ["avg"]
    divide, exchange = case("R S0 A > R S1 S0", shape=(8, 8), sizes=(2, 2, 2)).steps()
    assert (divide, type(exchange), exchange.op) == (Divide(2), AllToAll, "sum")
    assert [step.op for step in case("X X > R R").steps()] == ["max"]


# --- which collective ---


def test_a_reduction_is_followed_by_the_cut_that_could_not_come_before():
    # One element, on one of two ranks: the cut by b comes outside of the one by c, and still nothing moves.
    found = Case((("R",), ("S", 0), ("P", "sum")), (("S", 0), ("S", 0), ("R",)), (1,), (2, 2, 3))
    assert [type(step) for step in found.steps()] == [AllReduce, Narrow]
    assert found.problem() is None


def test_what_is_here_already_is_not_fetched():
    assert kinds("R R > S0 S1") == kinds("S0 R > S0 S0") == [Narrow]
    assert case("S0 S0 > S0 S0").steps() == ()
    assert case("S0 S1 > S1 S0", shape=(0, 5)).steps()[0].box((0, 0)).elements == 0


@pytest.mark.parametrize(
    ("words", "step", "axes"),
    [
        ("S0 S0 > R R", AllGather, (0, 1)),
        ("S0 S0 > S0 R", AllGather, (1,)),
        ("S0 S1 > R R", AllGather, (0, 1)),
        ("S0 R > S1 R", AllToAll, (0,)),
        ("S0 R > R S0", AllToAll, (0,)),  # the other axis has the rows at hand, from the same place on it
        ("S0 S1 > S1 S0", AllToAll, (0, 1)),
        ("S0 S0 > R S0", AllToAll, (0, 1)),
        ("P P > R R", AllReduce, (0, 1)),
        ("P P > S1 S0", ReduceScatter, (0, 1)),
        ("R P > S1 R", AllReduce, (1,)),
    ],
)
def test_one_collective_over_the_axes_that_it_takes(words, step, axes):
    (found,) = [s for s in case(words).steps() if isinstance(s, Collective)]
    assert (type(found), found.axes) == (step, axes)
    assert case(words).problem() is None


def test_a_shared_cut_that_stays_put_is_not_crossed():
    # S·S·R to R·S·S on one dim, cut 2 x 2 and again: the middle axis is where the piece is, before and after.
    order = (2, 1, 0)
    found = Case((("S", 0), ("S", 0), ("R",)), (("R",), ("S", 0), ("S", 0)), (8,), (2, 2, 2), None, None, order)
    assert found.problem() is None
    assert [s.axes for s in found.steps() if isinstance(s, Collective)] == [(0,)]


# --- groups at hand ---


def test_without_the_joint_group_one_axis_follows_the_other():
    assert shown("S0 S0 > R R", groups=()) == "all_gather(b) 32 B, all_gather(a) 64 B"
    assert shown("P P > R R", groups=()) == "all_reduce(a) 128 B, all_reduce(b) 128 B"
    assert shown("P P > S0 S1", groups=()) == "reduce_scatter(a) 64 B, reduce_scatter(b) 32 B"


def test_a_wider_group_is_left_alone():
    found = case("S0 S1 R > S1 S0 R", sizes=(2, 2, 2), groups=((0, 1, 2),))
    assert found.problem() is None
    assert [s.axes for s in found.steps() if isinstance(s, Collective)] == [(0,), (1,)]
    reduced = case("P P R > R R R", sizes=(2, 2, 2), groups=((0, 1, 2),))
    assert [s.axes for s in reduced.steps()] == [(0,), (1,)]


def test_two_collectives_reduce_by_the_group_of_all_that_talks():
    """Neither the pending axes nor those that move have a group of their own, but both together have."""
    for words in ("P P S0 > R R R", "S0 P P > R R S1", "P S0 P > S0 R R", "P P P > S0 R R"):
        found = case(words, shape=(8, 8), sizes=(2, 2, 2), groups=((0, 1, 2),))
        assert found.problem() is None
        apart = case(words, shape=(8, 8), sizes=(2, 2, 2), groups=())
        assert collectives(found.steps()) == 2 < collectives(apart.steps())


def test_groups_are_read_without_order_and_without_axes_of_size_one():
    assert case("S0 S0 R > R R R", sizes=(2, 2, 1), groups=((2, 1, 0),)).steps()[0].axes == (0, 1)


# --- costs ---


def test_bytes_come_before_time():
    """A plan that reduces takes the fewest bytes, whatever a collective costs without data."""
    assert collectives(case("P P > S0 R").steps()) == 2
    assert collectives(case("P P > S0 R", cost=Cost(latency=1.0)).steps()) == 2


# --- values ---
