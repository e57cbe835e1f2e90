"""Every plan of a (2,2,2) mesh on a 16x16 tensor of 4 bytes an element, as lines to read.

`EXPECTTEST_ACCEPT=1 pytest test/pure/test_plan_golden.py` writes the files anew; read the difference before it goes in.
"""

import itertools
import os
import pathlib

import pytest

from torch_overlay.distributed.tensor._planner.cost import collectives
from torch_overlay.distributed.tensor._planner.plan import line
from twins_tensor import Case
from width import NIGHTLY, sample

GOLDEN = pathlib.Path(__file__).parent / "golden"
MOVED = [("R",), ("S", 0), ("S", 1)]
PENDING = ("P", "sum")


def all_pairs(sizes, reductions):
    """Sources with and without pending sums, to all targets that have none."""
    for source in itertools.product([*MOVED, PENDING], repeat=len(sizes)):
        for target in itertools.product(MOVED, repeat=len(sizes)):
            if (PENDING in source) == reductions and source != target:
                yield source, target


def lines(sizes, reductions):
    """The plans for 16x16, one a line."""
    for source, target in all_pairs(sizes, reductions):
        case = Case(source, target, (16, 16), sizes)
        yield line(*case.ends(), case.steps(), 4)


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


@pytest.mark.parametrize(("name", "reductions"), [("moves_2x2x2", False), ("reductions_2x2x2", True)])
def test_plans_read_as_accepted(name, reductions):
    path = GOLDEN / f"{name}.txt"
    text = "".join(f"{found}\n" for found in lines((2, 2, 2), reductions))
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
