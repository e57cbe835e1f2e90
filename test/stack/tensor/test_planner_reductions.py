# Owner(s): ["oncall: distributed"]
"""How pending reductions end."""

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner import sizes as planner_forms
from torch_overlay.distributed.tensor._planner.cost import Cost, Groups, arriving, collectives
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions
from torch_overlay.distributed.tensor._planner.search import (
    Reduction,
    Scatters,
    plan,
    reduce_by_one_exchange,
    reduce_group_by_group,
    reduce_parts_by_exchange,
)
from torch_overlay.distributed.tensor._planner.sizes import shared_plan
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllReduce, AllToAll, Collective, ReduceScatter


def scatters(source, target, shape) -> Scatters:
    before, after = regions(source, shape), regions(target, shape)
    return Scatters(before, after, before.pending, Groups.of(None, SIZES))


class TestScatters(TestCase):
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_every_cut_is_along_all_dims_of_the_reduction(self, shape) -> None:
        for source, target in pairs((*MOVED, "sum")):
            asked = scatters(source, target, shape)
            for narrow in asked.narrowed() if asked.axes else ():
                cuts = [*asked.cuts(narrow)]
                self.assertEqual(len({*cuts}), len(cuts))
                for cut in cuts:
                    self.assertLessEqual(asked.axes, cut.sharded)
                    self.assertEqual(cut.pending & asked.axes, set())

    def test_the_target_comes_first_where_it_is_such_a_cut(self) -> None:
        for target in itertools.product((0, 1), repeat=3):
            asked = scatters(("sum",) * 3, target, (16, 16))
            self.assertEqual(next(asked.cuts(asked.before)), asked.after)

    def test_where_the_cuts_of_the_target_pad_another_one_comes_too(self) -> None:
        """Of five rows in four parts and three columns in two, boxes have four elements; of rows in eight, three."""
        asked = scatters(("sum",) * 3, (0, 0, 1), (5, 3))
        self.assertEqual([cut.most for cut in asked.cuts(asked.before)], [4, 3])

    def test_a_dim_that_divides_evenly_is_taken(self) -> None:
        asked = scatters(("sum", "sum", None), (None, None, None), (5, 8))
        (cut,) = asked.cuts(asked.before)
        self.assertEqual(cut.orders, ((), (0, 1)))


instantiate_parametrized_tests(TestScatters)


def reduction(source, target, shape) -> Reduction:
    """From pending reductions of one kind to none, with all groups at hand."""
    before, after = regions(source, shape), regions(target, shape)
    op = next(op for op in before.partial if op)
    return Reduction(before, after, before.pending, op, Groups.of(None, SIZES), 4, Cost())


def reductions(op="sum"):
    """All 999 pairs on a (2, 2, 2) mesh in which something is reduced."""
    return [(source, target) for source, target in pairs((*MOVED, op)) if op in source]


def grouped(source, target, shape, groups) -> Reduction:
    """With these joint groups at hand; None is all of them."""
    return replace(reduction(source, target, shape), groups=Groups.of(groups, SIZES))


WAYS = {
    "scatter_then_reduce": (Reduction.scatter_then_reduce, None),
    "move_then_reduce": (Reduction.move_then_reduce, None),
    "one exchange": (reduce_by_one_exchange, None),
    "group by group": (reduce_group_by_group, ()),
    "parts by exchange": (reduce_parts_by_exchange, ((0, 1, 2),)),
}


class TestReductions(TestCase):
    @parametrize("op", ["sum", "avg", "max"])
    @parametrize("way", [*WAYS])
    def test_each_way_reduces_every_term_once(self, op, way) -> None:
        """Whether it is the best or not."""
        ways, groups = WAYS[way]
        for source, target in reductions(op):
            asked = grouped(source, target, (5, 3), groups)
            for steps, now in ways(asked):
                self.assertTrue(is_right(steps, asked.before, now), msg=f"{source} to {target}: {steps}")

    @parametrize("op", ["sum", "avg", "max"])
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_two_collectives_reduce_every_term_once(self, op, shape) -> None:
        for source, target in reductions(op):
            asked = reduction(source, target, shape)
            steps = asked.best()
            self.assertLessEqual(collectives(steps), 2, msg=f"{source} to {target}")
            self.assertTrue(is_right(steps, asked.before, asked.after), msg=f"{source} to {target}: {steps}")

    @parametrize("groups", [(), ((0, 1), (1, 2)), ((0, 1, 2),)])
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_groups_that_there_are_reduce_every_term_once(self, groups, shape) -> None:
        joint = {frozenset(group) for group in groups}
        for source, target in reductions():
            asked = grouped(source, target, shape, groups)
            steps = asked.best()
            self.assertTrue(is_right(steps, asked.before, asked.after), msg=f"{source} to {target}: {steps}")
            for step in steps:
                if isinstance(step, Collective):
                    self.assertTrue(len(step.axes) == 1 or {*step.axes} in joint, msg=f"{source} to {target}: {step}")

    def test_a_part_is_cut_where_a_group_leads_on(self) -> None:
        """From R·S1·S0 to S1·S0·S1 mesh dims 1 and 2 would talk, without a group; from R·S1·S1 dim 1 does alone."""
        asked = grouped((None, 1, "sum"), (1, 0, 1), (16, 16), ())
        cuts = [cut.orders for cut in asked.scatters.cuts(asked.before)]
        self.assertEqual(cuts, [((2,), (1,)), ((), (1, 2))])

    @parametrize(
        "source, target, length, groups, steps",
        [
            (("sum", "sum", None), (0, 0, None), 16, None, [(ReduceScatter, 768)]),
            (("sum", None, "sum"), (None, None, None), 16, None, [(AllReduce, 1536)]),
            # What cuts the target is scattered before the rest is reduced.
            (("sum", "sum", None), (0, None, None), 64, None, [(ReduceScatter, 8192), (AllReduce, 8192)]),
            # What is smaller in the end is moved first.
            ((None, 0, "sum"), (0, 1, None), 1 << 10, None, [(AllToAll, 1 << 20), (AllReduce, 1 << 20)]),
            # A reduce-scatter and an all-to-all would bring 448 bytes.
            ((None, 0, "sum"), (None, 1, 1), 16, None, [(AllToAll, 384)]),
            # One all-reduce at once would bring 8192 bytes.
            (("sum", "sum", 0), (0, None, 1), 64, (), [(AllToAll, 4096), (ReduceScatter, 4096), (AllReduce, 4096)]),
            # As terms of a part for each rank, which then moves; all terms of what a rank wants would be 16384 bytes.
            (("sum", "sum", 0), (0, None, 1), 64, ((0, 1, 2),), [(AllToAll, 8192), (AllGather, 2048)]),
        ],
    )
    def test_the_busiest_rank_gets_the_fewest_bytes(self, source, target, length, groups, steps) -> None:
        plan = grouped(source, target, (length, length), groups).best()
        self.assertEqual([(type(step), 4 * arriving(step)) for step in plan], steps)


instantiate_parametrized_tests(TestReductions)


def ends(source, target, shape):
    """On a (2, 4) mesh."""
    return regions(source, shape, (2, 4)), regions(target, shape, (2, 4))


class TestSharedReductions(TestCase):
    def test_a_shared_reduction_leads_where_the_own_one_does(self) -> None:
        ends_of = pairs((*MOVED, "sum", "avg"), (*MOVED, "sum"), 2)
        changes = [pair for pair in ends_of if {"sum", "avg"}.intersection((*pair[0], *pair[1]))]
        for shape, (source, target) in itertools.product(((8, 16), (40, 8), (5, 3)), changes):
            before, after = ends(source, target, shape)
            with contextlib.suppress(NotPlanned):
                shared, own = shared_plan(before, after, 4), plan(before, after, 4)
                self.assertEqual(collectives(shared), collectives(own), msg=f"{source} to {target} of {shape}")
                self.assertTrue(is_right(shared, before, after), msg=f"{source} to {target} of {shape}")

    def test_a_plan_that_tried_to_cut_another_dim_is_not_shared(self) -> None:
        """Of two tensors with the same bytes in the smallest one, each plan cuts the dim that is cut evenly."""
        pending, sizes = (None, "sum", "sum"), (2, 2, 4)
        planner_forms._forms.cache_clear()
        with mock.patch.object(planner_forms, "plan", wraps=plan) as own:
            for columns, rows, cut in ((6, 32, 2), (16, 12, 1)):
                shape = (80, columns, rows)
                before = Regions.of((0, None, None), pending, shape, sizes)
                after = Regions.of((None, None, 0), (None,) * 3, shape, sizes)
                steps = shared_plan(before, after, 4, frozenset({(0, 1, 2)}))
                self.assertEqual(steps[0].after.orders[cut], (0, 1, 2))
        self.assertEqual(own.call_count, 2)

    def test_plans_to_new_pending_sums_are_not_shared(self) -> None:
        planner_forms._forms.cache_clear()
        with mock.patch.object(planner_forms, "plan", wraps=plan) as own:
            for length in (1024, 1032):
                shared_plan(*ends((0, None), ("sum", 0), (length, 64)), 4)
        self.assertEqual(own.call_count, 2)


if __name__ == "__main__":
    run_tests()
