# Owner(s): ["oncall: distributed"]
"""Plans from two sets of placements."""

import contextlib
import dataclasses
import itertools
import sys
from unittest import mock

import torch
from planner_simulator import MOVED, SIZES, is_right, pairs, regions
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner import forms as planner_forms
from torch_overlay.distributed.tensor._planner.cost import Cost, Groups, arriving, collectives, leaving
from torch_overlay.distributed.tensor._planner.forms import plan_and_parts, rounded_parts, shared_plan, step_on_shape
from torch_overlay.distributed.tensor._planner.grids import grids, talkers
from torch_overlay.distributed.tensor._planner.moves import move
from torch_overlay.distributed.tensor._planner.plan import _embed_first, in_rounds, line, plan
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions
from torch_overlay.distributed.tensor._planner.steps import (
    AllGather,
    AllToAll,
    Collective,
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

    def test_a_small_tensor_takes_one(self) -> None:
        ends = [regions(spec, (1 << 10, 1 << 10)) for spec in ((0, 0, 0), (None, None, 1))]
        steps = move(*ends, Groups.of(None, SIZES), 4, Cost())
        self.assertEqual(in_rounds(steps, 4, Cost()), steps)

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
    @parametrize(
        "source, target, kinds",
        [
            ((None, 0), (0, "sum"), [Embed, Narrow]),
            ((0, 0), (None, "sum"), [Embed, AllGather]),
            ((0, 0), ("sum", 0), [AllGather, Embed, Narrow]),
            ((0, 1), (1, "sum"), [Embed, AllToAll]),
        ],
    )
    def test_where_it_comes_first(self, source, target, kinds) -> None:
        before, after = (regions(ends, (64, 64), TWO_BY_TWO) for ends in (source, target))
        self.assertEqual([*map(type, plan(before, after, 4, ()))], kinds)

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

    def test_parts_of_moves_divide_the_rounded_ones(self) -> None:
        for source, target in pairs((*MOVED, "sum"), MOVED, 2):
            with contextlib.suppress(NotPlanned):
                _, parts = plan_and_parts(*ends(source, target, (24, 40)), 4, None, Cost())
                rounded = rounded_parts(*ends(source, target, (24, 40)))
                for part, whole in zip(parts, rounded, strict=True):
                    whole, part = (part, whole) if "sum" in source else (whole, part)
                    self.assertEqual(whole % part, 0, msg=f"{source} to {target}: {part}, {whole}")

    def test_all_axes_that_take_part_count(self) -> None:
        """The plan cuts the rows into 4 and the columns into 2. Plans for other sizes may cut each of them into 8, by
        both mesh dims."""
        steps, parts = plan_and_parts(*ends(("sum", 0), (1, 0), (24, 40)), 4, None, Cost())
        self.assertEqual(([*map(type, steps)], parts), ([ReduceScatter], (8, 8)))

    def test_a_dim_that_the_plan_for_another_size_cuts_counts(self) -> None:
        """Also where terms are made of a value on a mesh dim more. Of 6 columns the plan cuts none, of 16 it does."""
        for more in ((), (None,)):
            source, target, sizes = (0, "sum", "sum", *more), (None, None, 0, *more), (2, 2, 4, 2)[: 3 + len(more)]
            target = (*target[:3], "sum") if more else target
            asked = [(regions(source, (80, n, 32), sizes), regions(target, (80, n, 32), sizes)) for n in (6, 16)]
            found = [plan_and_parts(*ends, 4, frozenset({(0, 1, 2)}), Cost()) for ends in asked]
            cut = [any(step.after.orders[1] for step in steps if not isinstance(step, Divide)) for steps, _ in found]
            self.assertEqual((cut, found[0][1][1]), ([False, True], 16))


TWO_BY_THREE = (2, 3)


def cut(tensor, box):
    """A view of a box; a piece's box counts from the start of what holds it."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def all_to_all(source, target, shape, axes=(0, 1)) -> AllToAll:
    before, after = (Regions.of(dims, (None, None), shape, TWO_BY_THREE) for dims in (source, target))
    return AllToAll(before, after, axes)


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
        self._check_grids(all_to_all(source, target, (12, 6), axes))

    def test_a_pack_where_the_inner_axis_cuts_first(self) -> None:
        step = all_to_all((0, 0), (1, 1), (12, 6))
        self._check_grids(dataclasses.replace(step, before=step.before._replace(orders=((1, 0), ()))))

    def _check_grids(self, step) -> None:
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

    def test_other_steps_have_none(self) -> None:
        uneven, crossed = all_to_all((0, 0), (1, 1), (7, 4)), all_to_all((0, 1), (1, 0), (12, 6))
        regrouped = all_to_all((0, None), (1, 1), (12, 6), axes=(0,))  # equal pieces; the other axis cuts, too
        for step in (uneven, crossed, regrouped):
            self._check_has_none(step, (0, 0))

    def test_a_gather_that_pads_has_none(self) -> None:
        """The last three of seven rows, one from each member, where others send two."""
        sixths, halves = (Regions.of(dims, (None,) * 2, (7,), TWO_BY_THREE) for dims in ((0, 0), (0, None)))
        self._check_has_none(AllGather(sixths, halves, (1,)), (1, 0))

    def test_a_scatter_that_pads_or_that_a_free_axis_cuts_too_has_none(self) -> None:
        """Seven rows for two; and six of twelve rows for each of two, of which a rank has one third."""
        for length, axes in ((7, (None, None)), (12, (None, 0))):
            pending = Regions.of((None,) * 2, ("sum", None), (length,), TWO_BY_THREE)
            shards = Regions.of((0, axes[1]), (None,) * 2, (length,), TWO_BY_THREE)
            self._check_has_none(ReduceScatter(pending, shards, (0,), "sum"), (0, 0))

    def test_members_that_exchange_nothing(self) -> None:
        """Those that differ along an axis whose cut stays have nothing for each other; along one that doesn't cut the
        source and cuts the target, there is no grid."""
        stays = all_to_all((0, 1), (0, None), (12, 6))
        self.assertEqual(talkers(stays, (1, 0)), [0, 0, 0, 1, 1, 1])
        pack, unpack = grids(stays, stays.before.box((1, 0)), stays.after.box((1, 0)))
        self.assertEqual((pack.expanded, unpack.lengths), ((3, 6, 2), (3, 6, 2)))
        self._check_has_none(all_to_all((None, 0), (1, None), (12, 6)), (0, 0))

    def test_terms_come_first_where_they_are_reduced(self) -> None:
        before = Regions.of((None, 0), ("sum", None), (12, 6), TWO_BY_THREE)
        after = Regions.of((1, 1), (None, None), (12, 6), TWO_BY_THREE)
        _, unpack = grids(AllToAll(before, after, (0, 1), "sum", (0,)), before.box((0, 0)), after.box((0, 0)))
        self.assertEqual((unpack.lengths, unpack.order), ((2, 3, 4, 1), (0, 1, 2, 3)))

    def _check_has_none(self, step, place) -> None:
        self.assertEqual(grids(step, step.before.box(place), step.after.box(place)), (None, None), msg=f"{step}")


instantiate_parametrized_tests(TestGrids)


if __name__ == "__main__":
    run_tests()
