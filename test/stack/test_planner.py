# Owner(s): ["oncall: distributed"]
"""Plans as values: how many collectives they have, over which mesh dims, how much they move, and how they read."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.cost import arriving, collectives
from torch_overlay.distributed.tensor._planner.plan import line, plan
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Collective

SIZES, SHAPE, ITEMSIZE = (2, 2, 2), (16, 16), 4
MOVED, PENDING = (None, 0, 1), "sum"  # the dim that a mesh dim shards, or a pending reduction


def regions(spec, shape=SHAPE) -> Regions:
    """One entry a mesh dim: None, the dim that it shards, or a pending reduction."""
    dims = [entry if isinstance(entry, int) else None for entry in spec]
    ops = [entry if isinstance(entry, str) else None for entry in spec]
    return Regions.of(dims, ops, shape, SIZES)


def cells(box):
    """The elements of a box, by their indices."""
    return itertools.product(*(range(start, start + length) for start, length in zip(*box, strict=True)))


def pairs(reduces: bool):
    """Sources with or without pending sums, and every target that has none."""
    for source in itertools.product([*MOVED, PENDING], repeat=3):
        for target in itertools.product(MOVED, repeat=3):
            if (PENDING in source) == reduces and source != target:
                yield source, target


class TestPlan(TestCase):
    """On a (2, 2, 2) mesh, which needs no process group, since a plan is a value."""

    @parametrize("reduces", [False, True])
    def test_number_of_collectives(self, reduces) -> None:
        counts = [collectives(plan(regions(s), regions(t), ITEMSIZE)) for s, t in pairs(reduces)]
        self.assertEqual(len(counts), 999 if reduces else 702)
        self.assertEqual(max(counts), 2 if reduces else 1)
        self.assertEqual(sum(counts), 1464 if reduces else 630)

    @parametrize("reduces", [False, True])
    def test_a_replica_that_stays_one_takes_no_part(self, reduces) -> None:
        for source, target in pairs(reduces):
            still = {a for a in range(3) if source[a] is target[a] is None}
            for step in plan(regions(source), regions(target), ITEMSIZE):
                if isinstance(step, Collective):
                    self.assertEqual({*step.axes} & still, set(), msg=f"{source} to {target}: {step}")

    @parametrize("shape", [(4, 4), (8, 2)])
    def test_an_all_to_all_brings_what_is_lacking(self, shape) -> None:
        """No more arrives anywhere in an all-to-all than the new box has, and no less than what is lacking."""
        for source, target in pairs(reduces=False):
            before, after = regions(source, shape), regions(target, shape)
            for step in plan(before, after, ITEMSIZE):
                if not isinstance(step, AllToAll):
                    continue
                self.assertLessEqual(arriving(step), after.most)
                boxes = [(before.box(c), after.box(c)) for c in itertools.product(range(2), repeat=3)]
                lacking = max(len({*cells(new)} - {*cells(old)}) for old, new in boxes)
                self.assertGreaterEqual(arriving(step), lacking, msg=f"{source} to {target}")

    def test_without_a_joint_group_there_are_more_collectives_not_more_ranks(self) -> None:
        source, target = regions((0, 0, 0)), regions((None, None, None))
        self.assertEqual([len(s.axes) for s in plan(source, target, ITEMSIZE)], [3])
        alone = plan(source, target, ITEMSIZE, groups=())
        self.assertEqual([len(step.axes) for step in alone if isinstance(step, Collective)], [1, 1, 1])

    @parametrize(
        "source, target, text",
        [
            ((None, None, None), (None, None, 0), "narrow"),
            ((0, None, None), (None, None, None), "all_gather(a)"),
            ((0, 0, None), (1, 1, None), "all_to_all(a,b)"),
            (("sum", "sum", None), (None, None, None), "all_reduce(a,b)"),
            (("sum", None, None), (0, None, None), "reduce_scatter(a)"),
        ],
    )
    def test_how_a_plan_reads(self, source, target, text) -> None:
        ends = regions(source), regions(target)
        self.assertIn(text, line(*ends, plan(*ends, ITEMSIZE), ITEMSIZE))


instantiate_parametrized_tests(TestPlan)

if __name__ == "__main__":
    run_tests()
