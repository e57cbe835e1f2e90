"""All pairs of placements on a (2, 2, 2) mesh: what plans take in all, and that each is right on every rank."""

import itertools

import pytest

from torch_overlay.distributed.tensor._planner.cost import arriving_by, collectives
from twins_tensor import Case
from width import NIGHTLY, sample

MOVED = [("R",), ("S", 0), ("S", 1)]
PENDING = ("P", "sum")


def all_pairs(sizes, reductions):
    """Sources with and without pending sums, to all targets that have none."""
    for source in itertools.product([*MOVED, PENDING], repeat=len(sizes)):
        for target in itertools.product(MOVED, repeat=len(sizes)):
            if (PENDING in source) == reductions and source != target:
                yield source, target


@pytest.mark.parametrize(("sizes", "count"), [((2, 2, 2), 702), ((4, 2), 72)])
def test_a_move_takes_at_most_one_collective(sizes, count):
    plans = [Case(s, t, (16, 16), sizes).steps() for s, t in all_pairs(sizes, reductions=False)]
    assert len(plans) == count
    assert max(map(collectives, plans)) == 1


@pytest.mark.parametrize(("sizes", "count"), [((2, 2, 2), 999), ((4, 2), 63)])
def test_a_reduction_takes_at_most_two_collectives(sizes, count):
    plans = [Case(s, t, (16, 16), sizes).steps() for s, t in all_pairs(sizes, reductions=True)]
    assert len(plans) == count
    assert max(map(collectives, plans)) == 2
    assert min(map(collectives, plans)) == 1


@pytest.mark.parametrize("reductions, talks, elements", [(False, 630, 41_432), (True, 1_464, 117_720)])
def test_plans_take_in_all_no_more_than_they_did(reductions, talks, elements):
    """Collectives, and elements that the busiest rank gets. Fewer: write it here and into docs/figures.json."""
    plans = [Case(s, t, (16, 16), (2, 2, 2)).steps() for s, t in all_pairs((2, 2, 2), reductions)]
    assert (sum(map(collectives, plans)), sum(map(arriving_by, plans))) == (talks, elements)


@pytest.mark.parametrize("reductions", [False, True])
@pytest.mark.parametrize(("shape", "first"), [((8, 2), 0), ((5, 3), 1)])
def test_every_pair_is_right_on_every_rank(reductions, shape, first):
    """With all groups: by day a fifth of the pairs, since the test below has every one with some."""
    pairs = sample(all_pairs((2, 2, 2), reductions), 5, first)
    problems = [(pair, Case(*pair, shape, (2, 2, 2)).problem()) for pair in pairs]
    assert [found for found in problems if found[1]] == []


@pytest.mark.parametrize("reductions", [False, True])
@pytest.mark.parametrize("first", range(4 if NIGHTLY else 1))
def test_every_pair_is_right_with_some_groups(reductions, first):
    """Each pair with one of the 16 sets of joint groups, at night with four; the pairs together see all of them."""
    joint = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    sets = [some for n in range(5) for some in itertools.combinations(joint, n)]
    found = []
    for number, pair in enumerate(all_pairs((2, 2, 2), reductions)):
        case = Case(*pair, [(4, 2), (5, 3)][number % 2], (2, 2, 2), sets[(5 * number + 4 * first) % len(sets)])
        found += [(case, case.problem())] if case.problem() else []
    assert found == []
