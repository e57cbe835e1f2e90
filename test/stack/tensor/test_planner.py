# Owner(s): ["oncall: distributed"]
"""Plans from two sets of placements."""

import contextlib
import itertools
import sys
from unittest import mock

import torch
from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner import sizes as planner_forms
from torch_overlay.distributed.tensor._planner.cost import Cost, Groups, arriving, collectives, in_rounds, leaving
from torch_overlay.distributed.tensor._planner.grids import grids
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions
from torch_overlay.distributed.tensor._planner.search import _embed_first, move, plan
from torch_overlay.distributed.tensor._planner.sizes import plan_and_parts, shared_plan, step_on_shape
from torch_overlay.distributed.tensor._planner.steps import (
    AllGather,
    AllToAll,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
)

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


class TestAtAnySize(TestCase):
    @parametrize("source", [("sum", 0, "sum"), (0, 0, 0), (None, 0, 0), ("sum", "sum", "sum"), (1, "sum", 0)])
    @parametrize("target", [(0, 0, 0), (None, 0, 0), (1, 0, 1)])
    @parametrize("groups", [None, (), ((0, 1, 2),)])
    def test_the_work_does_not_grow_with_the_ranks(self, source, target, groups) -> None:
        """Chunks aren't walked: with 110,592 ranks it takes about as many calls as with 64, uneven lengths included."""
        few, many = [
            calls(plan, *[regions(spec, (1000003, 33), (n, n, n)) for spec in (source, target)], 4, groups)
            for n in (4, 48)
        ]
        self.assertLess(many, 3 * few + 3000)


def calls(run, *arguments) -> int:
    """How many functions of Python it calls."""
    seen = 0

    def count(frame, event, argument) -> None:
        nonlocal seen
        seen += event == "call"

    sys.setprofile(count)
    try:
        run(*arguments)
    finally:
        sys.setprofile(None)
    return seen


instantiate_parametrized_tests(TestAtAnySize)


class TestPlan(TestCase):
    """On a (2, 2, 2) mesh, which needs no process group, since a plan is a value."""

    @parametrize("reduces", [False, True])
    def test_number_of_collectives(self, reduces) -> None:
        counts = [collectives(planned(*ends)) for ends in changes(reduces)]
        self.assertEqual(len(counts), 999 if reduces else 702)
        self.assertEqual(max(counts), 2 if reduces else 1)
        self.assertEqual(sum(counts), 1464 if reduces else 630, msg="as the plans are now")

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


class TestRounds(TestCase):
    def test_no_round_holds_more_than_a_rank_has(self) -> None:
        several = 0
        for source, target in pairs():
            ends = [regions(spec, (1 << 14, 1 << 12)) for spec in (source, target)]
            for step in in_rounds(move(*ends, Groups.of(None, SIZES), 4, Cost()), 4, Cost()):
                if isinstance(step, AllToAll) and len(step.axes) > 1:
                    staged = arriving(step) + leaving(step)
                    self.assertLessEqual(staged, step.rounds * step.before.most)
                    several += step.rounds > 1
        self.assertGreater(several, 100)

    def test_a_round_has_more_than_half_of_the_least(self) -> None:
        for rows, rounds in ((14 << 10, 4), (23 << 10, 8)):
            ends = [regions(spec, (rows, 1 << 10)) for spec in ((0, 0, 0), (None, None, 1))]
            (step,) = in_rounds(move(*ends, Groups.of(None, SIZES), 4, Cost()), 4, Cost())
            self.assertEqual(step.rounds, rounds)
            self.assertGreater(4 * (arriving(step) + leaving(step)) / rounds, Cost().round_bytes / 2)

    def test_what_a_reduce_scatter_packs_is_packed_in_rounds(self) -> None:
        """Where it cuts another tensor dim than the first, or begins with a view; and evenly."""
        for source, target, columns, rounds in (
            (("sum", "sum", None), (0, 1, None), 1 << 12, 4),
            (("sum", "sum", None), (0, 0, None), 1 << 12, 1),
            (("sum", "sum", None), (1, 1, None), 1 << 12, 4),
            (("sum", "sum", 1), (0, 0, 1), 1 << 12, 2),
            (("sum", "sum", None), (0, 1, None), (1 << 12) + 1, 1),
        ):
            whole, before, after = (
                regions(spec, (1 << 12, columns)) for spec in (("sum", "sum", None), source, target)
            )
            narrow = () if whole == before else (Narrow(whole, before),)
            steps = in_rounds((*narrow, ReduceScatter(before, after, (0, 1), "sum")), 4, Cost())
            self.assertEqual(steps[-1].rounds, rounds, msg=f"{target} of {columns}")


class TestTerms(TestCase):
    """A shard becomes a term with zeros around it, a value is divided by the number of terms."""

    @parametrize("ops, plans", [(("sum", "avg"), 441), (("max",), 196)])
    @parametrize("groups", [None, ()])
    def test_every_rank_ends_with_its_part_or_its_term(self, ops, plans, groups) -> None:
        """Of all pairs on a (2, 3) mesh that can be planned, pending targets among them."""
        ran = 0
        for source, target in pairs((*MOVED, *ops), (*MOVED, *ops), 2):
            before, after = (regions(spec, (4, 5), (2, 3)) for spec in (source, target))
            with contextlib.suppress(NotPlanned):
                steps = plan(before, after, 4, groups)
                self.assertTrue(is_right(steps, before, after), msg=f"{source} to {target}: {steps}")
                ran += 1
        self.assertEqual(ran, plans, msg="the others can't be made")

    @parametrize(
        "source, target, why",
        [
            ("sum", "avg", "a pending sum can't become a pending avg"),
            (0, "avg", "a shard can't become a term of avg"),
            (None, "product", "a value can't be split into terms of product"),
        ],
    )
    def test_terms_that_cannot_be_made_are_refused(self, source, target, why) -> None:
        with self.assertRaisesRegex(NotPlanned, why):
            plan(*(regions((end, None), (4, 4), (2, 2)) for end in (source, target)), 4)


instantiate_parametrized_tests(TestTerms)


TWO_BY_TWO = (2, 2)


class TestEmbedFirst(TestCase):
    @parametrize("groups", [None, ()])
    def test_every_rank_ends_with_its_part_or_its_term(self, groups) -> None:
        """Whether it is the best or not."""
        for source, target in pairs((*MOVED, "sum"), (*MOVED, "sum"), 2):
            before, after = (regions(ends, (5, 4), TWO_BY_TWO) for ends in (source, target))
            made = after.pending - before.pending
            if made and made <= before.sharded:
                steps = _embed_first(before, after, made, Groups.of(groups, TWO_BY_TWO), 4, Cost())
                self.assertTrue(is_right(steps, before, after), msg=f"{source} to {target}: {steps}")

    def test_it_takes_no_more_collectives(self) -> None:
        """Zeros last would be three collectives that bring less: gathers over the third and the second mesh dim, then
        an all-to-all."""
        ends = ((0, 0, 0), (None, 0, "sum"))
        before, after = (regions(spec, (1 << 10, 1 << 10), (2, 2, 2)) for spec in ends)
        self.assertEqual([*map(type, plan(before, after, 4, ()))], [Embed, AllGather, AllToAll])


instantiate_parametrized_tests(TestEmbedFirst)


def ends(source, target, shape):
    """On a (2, 4) mesh."""
    return regions(source, shape, (2, 4)), regions(target, shape, (2, 4))


class TestForms(TestCase):
    def test_a_shared_plan_leads_where_the_own_one_does(self) -> None:
        changes = pairs(MOVED, MOVED, 2)
        for shape, (source, target) in itertools.product(((8, 16), (40, 8), (5, 3)), changes):
            before, after = ends(source, target, shape)
            shared, own = shared_plan(before, after, 4), plan(before, after, 4)
            self.assertEqual(collectives(shared), collectives(own), msg=f"{source} to {target} of {shape}")
            self.assertTrue(is_right(shared, before, after), msg=f"{source} to {target} of {shape}")

    def test_sizes_of_one_form_are_planned_once(self) -> None:
        planner_forms._forms.cache_clear()
        with mock.patch.object(planner_forms, "plan_at_once", wraps=planner_forms.plan_at_once) as planned:
            for length in (1024, 1032, 1040):
                shared_plan(*ends((0, 0), (1, None), (length, 64)), 4)
        self.assertEqual(planned.call_count, 1)


class TestEvenParts(TestCase):
    def test_the_plan_cuts_multiples_of_its_parts_evenly(self) -> None:
        for source, target in pairs((*MOVED, "sum"), (*MOVED, "sum"), 2):
            with contextlib.suppress(NotPlanned):
                steps, parts = plan_and_parts(*ends(source, target, (24, 40)), 4, None, Cost())
                changes = [step for step in steps if not isinstance(step, Divide)]
                for factor in (1, 3):
                    shape = tuple(factor * part for part in parts)
                    before, after = ends(source, target, shape)
                    on_shape = [step_on_shape(step, shape) for step in changes]
                    states = [before, after, *[end for step in on_shape for end in (step.before, step.after)]]
                    self.assertTrue(all(state.is_even for state in states), msg=f"{source} to {target} of {shape}")

    def test_a_dim_that_the_plan_for_another_size_cuts_counts(self) -> None:
        """Also where terms are made of a value on a mesh dim more. Of 6 columns the plan cuts none, of 16 it does."""
        for more in ((), (None,)):
            source, target, sizes = (0, "sum", "sum", *more), (None, None, 0, *more), (2, 2, 4, 2)[: 3 + len(more)]
            target = (*target[:3], "sum") if more else target
            asked = [(regions(source, (80, n, 32), sizes), regions(target, (80, n, 32), sizes)) for n in (6, 16)]
            plans = [plan_and_parts(*ends, 4, frozenset({(0, 1, 2)}), Cost()) for ends in asked]
            cut = [any(step.after.orders[1] for step in steps if not isinstance(step, Divide)) for steps, _ in plans]
            self.assertEqual((cut, plans[0][1][1]), ([False, True], 16))


TWO_BY_THREE = (2, 3)


def cut(tensor, box):
    """A view of a box; a piece's box counts from the start of what holds it."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


class TestGrids(TestCase):
    @parametrize(
        "source, target, axes",
        [
            ((0, 0), (1, 1), (0, 1)),
            ((0, 0), (None, 1), (0, 1)),
            ((0, 0), (1, None), (0, 1)),
            ((0, 0), (0, 1), (1,)),  # an axis outside the group cuts, too
        ],
    )
    def test_a_pack_is_the_list_of_pieces(self, source, target, axes) -> None:
        before, after = (Regions.of(dims, (None, None), (12, 6), TWO_BY_THREE) for dims in (source, target))
        step = AllToAll(before, after, axes)
        whole = torch.arange(72).reshape(12, 6)
        for place in itertools.product(*map(range, TWO_BY_THREE)):
            held, wanted = step.before.box(place), step.after.box(place)
            pack, unpack = grids(step, held, wanted)
            local = cut(whole, held).reshape(pack.lengths).expand(pack.expanded)
            packed = local.permute(pack.order).reshape(-1)
            sent = list(step.sends(place))
            self.assertEqual([piece.member for piece in sent], [*range(step.ranks)])
            pieces = [cut(cut(whole, held), piece.box).reshape(-1) for piece in sent]
            self.assertEqual(packed, torch.cat(pieces), msg=f"{place}")
            came = [cut(cut(whole, wanted), piece.box).reshape(-1) for piece in step.receives(place)]
            flat = torch.cat(came).reshape(unpack.lengths).permute(unpack.order)
            self.assertEqual(flat.reshape(wanted.length), cut(whole, wanted))

    @parametrize("cuts", [(0, 0), (0, 1), (1, 0), (1, 1)])
    def test_a_gather_and_a_scatter_have_the_list_of_pieces(self, cuts) -> None:
        whole = torch.arange(72).reshape(12, 6)
        shards, pending = (
            Regions.of(*dims_and_ops, (12, 6), TWO_BY_THREE)
            for dims_and_ops in ((cuts, (None,) * 2), ((None,) * 2, ("sum",) * 2))
        )
        gather = AllGather(shards, Regions.of((None,) * 2, (None,) * 2, (12, 6), TWO_BY_THREE), (0, 1))
        scatter = ReduceScatter(pending, shards, (0, 1), "sum")
        for place in itertools.product(*map(range, TWO_BY_THREE)):
            shard, all_of_it = shards.box(place), pending.box(place)
            pack, unpack = grids(gather, shard, all_of_it)
            self.assertIsNone(pack)
            flat = torch.cat([cut(whole, piece.box).reshape(-1) for piece in gather.pieces(place)])
            self.assertEqual(flat.reshape(unpack.lengths).permute(unpack.order).reshape(12, 6), whole)
            pack, unpack = grids(scatter, all_of_it, shard)
            self.assertIsNone(unpack)
            packed = whole.reshape(pack.lengths).permute(pack.order).reshape(-1)
            pieces = [cut(whole, piece.box).reshape(-1) for piece in scatter.pieces(place)]
            self.assertEqual(packed, torch.cat(pieces), msg=f"{place}")


instantiate_parametrized_tests(TestGrids)


if __name__ == "__main__":
    run_tests()
