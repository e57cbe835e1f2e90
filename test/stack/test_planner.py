# Owner(s): ["oncall: distributed"]
"""Plans as values: how many collectives they have, over which mesh dims, how much they move, and how they read."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import arriving, collectives
from torch_overlay.distributed.tensor._planner.plan import line, plan
from torch_overlay.distributed.tensor._planner.regions import NotPlanned
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Collective, Narrow

SHAPE = (16, 16)


def planned(source, target, shape=SHAPE, groups=None):
    """Of four bytes an element, on a (2, 2, 2) mesh."""
    return plan(regions(source, shape), regions(target, shape), 4, groups)


def cells(box):
    """The elements of a box, by their indices."""
    return itertools.product(*(range(start, start + length) for start, length in zip(*box, strict=True)))


def changes(reduces: bool):
    """Sources with or without pending sums, and every other target that has none."""
    ends = pairs((*MOVED, "sum"))
    return [(source, target) for source, target in ends if ("sum" in source) == reduces and source != target]


class TestPlan(TestCase):
    """On a (2, 2, 2) mesh, which needs no process group, since a plan is a value."""

    @parametrize("reduces", [False, True])
    def test_number_of_collectives(self, reduces) -> None:
        counts = [collectives(planned(*ends)) for ends in changes(reduces)]
        self.assertEqual(len(counts), 999 if reduces else 702)
        self.assertEqual(max(counts), 2 if reduces else 1)
        self.assertEqual(sum(counts), 1464 if reduces else 630, msg="as the plans are now")

    @parametrize("reduces", [False, True])
    def test_a_replica_that_stays_one_takes_no_part(self, reduces) -> None:
        for source, target in changes(reduces):
            still = {a for a in range(3) if source[a] is target[a] is None}
            for step in planned(source, target):
                if isinstance(step, Collective):
                    self.assertEqual({*step.axes} & still, set(), msg=f"{source} to {target}: {step}")

    @parametrize("shape", [(4, 4), (8, 2)])
    def test_an_all_to_all_brings_what_is_lacking(self, shape) -> None:
        """No more arrives anywhere in an all-to-all than the new box has, and no less than what is lacking."""
        for source, target in changes(reduces=False):
            before, after = regions(source, shape), regions(target, shape)
            for step in planned(source, target, shape):
                if not isinstance(step, AllToAll):
                    continue
                self.assertLessEqual(arriving(step), after.most)
                boxes = [(before.box(c), after.box(c)) for c in itertools.product(range(2), repeat=3)]
                lacking = max(len({*cells(new)} - {*cells(old)}) for old, new in boxes)
                self.assertGreaterEqual(arriving(step), lacking, msg=f"{source} to {target}")

    def test_without_a_joint_group_there_are_more_collectives_not_more_ranks(self) -> None:
        ends = (0, 0, 0), (None, None, None)
        self.assertEqual([len(step.axes) for step in planned(*ends)], [3])
        alone = planned(*ends, groups=())
        self.assertEqual([len(step.axes) for step in alone if isinstance(step, Collective)], [1, 1, 1])

    @parametrize(
        "source, target, text",
        [
            ((None, None, None), (None, None, 0), "R·R·R → R·R·S0: narrow"),
            ((0, None, None), (None, None, None), "S0·R·R → R·R·R: all_gather(a) 512 B"),
            ((0, 0, None), (1, 1, None), "S0·S0·R → S1·S1·R: all_to_all(a,b) 192 B"),
            (("sum", "sum", None), (None, None, None), "P·P·R → R·R·R: all_reduce(a,b) 1536 B"),
            (("sum", None, None), (0, None, None), "P·R·R → S0·R·R: reduce_scatter(a) 512 B"),
        ],
    )
    def test_how_a_plan_reads(self, source, target, text) -> None:
        ends = regions(source, SHAPE), regions(target, SHAPE)
        self.assertEqual(line(*ends, plan(*ends, 4), 4), text)

    def test_an_empty_tensor_is_sent_nowhere_if_it_is_cut_otherwise(self) -> None:
        """Else it has the plan of other sizes: who compiles for a size that isn't known doesn't know that it's 0."""
        (step,) = planned(("sum", 0, None), (None, 1, None), (0, 16))
        self.assertIsInstance(step, Narrow)
        for source, target in ((("sum", "avg", None), (None, None, None)), (("sum", 0, "sum"), (None, 0, "sum"))):
            for groups in (None, ()):
                few, many = (
                    [(type(step), getattr(step, "axes", ())) for step in planned(source, target, (rows, 16), groups)]
                    for rows in (0, 16)
                )
                self.assertEqual(few, many)

    def test_what_cannot_be_planned_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "no way from .* to "):
            plan(regions((0,), (4,), (2,)), regions((None,), (6,), (2,)), 4)
        with self.assertRaises(NotPlanned):
            planned(("sum", None, None), ("avg", None, None))

    @parametrize("ops, plans", [(("sum", "avg"), 144), (("max",), 63)])
    @parametrize("groups", [None, ()])
    def test_every_rank_ends_with_its_part(self, ops, plans, groups) -> None:
        """Of all pairs on a (2, 3) mesh that end a reduction."""
        ends = [(source, target) for source, target in pairs((*MOVED, *ops), MOVED, 2) if {*source} & {*ops}]
        self.assertEqual(len(ends), plans)
        for source, target in ends:
            before, after = (regions(spec, (4, 5), (2, 3)) for spec in (source, target))
            steps = plan(before, after, 4, groups)
            self.assertTrue(is_right(steps, before, after), msg=f"{source} to {target}: {steps}")


instantiate_parametrized_tests(TestPlan)

if __name__ == "__main__":
    run_tests()
