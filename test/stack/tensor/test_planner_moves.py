# Owner(s): ["oncall: distributed"]
"""What moving a tensor takes, and costs."""

import itertools
import random

import torch
from planner_simulator import SIZES, exchange, is_right, pairs, regions, sent
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.boxes import lengths, runs, same_pieces
from torch_overlay.distributed.tensor._planner.cost import (
    Cost,
    Groups,
    _cuts_nest,
    arriving,
    collectives,
    leaving,
    most_sent,
)
from torch_overlay.distributed.tensor._planner.regions import Regions, least_overlap
from torch_overlay.distributed.tensor._planner.search import all_to_alls, crossed, move
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Collective, Exchange, Narrow


def drawn(rng: random.Random) -> Exchange:
    """Between two orders of cuts of a tensor of one dim."""
    sizes = tuple(rng.choices((2, 3, 4, 6), k=rng.choice((2, 3))))
    cuts = [tuple(rng.sample(range(len(sizes)), rng.randrange(len(sizes) + 1))) for _ in range(2)]
    length = rng.choice((12, 36, 48, 144))
    before, after = (Regions((length,), sizes, (cut,), (None,) * len(sizes)) for cut in cuts)
    return Exchange(before, after, tuple(range(len(sizes))))


class TestCrossed(TestCase):
    def test_it_is_what_elements_say(self) -> None:
        """An axis is crossed if some element has a holder and a receiver at different coordinates on it."""
        rng, seen = random.Random(2), set()
        for _ in range(400):
            asked = drawn(rng)
            length = rng.choice((asked.before.shape[0], rng.randrange(60)))
            before, after = (Regions((length,), *ends[1:]) for ends in (asked.before, asked.after))
            true = {a for a in before.orders[0] if a not in after.orders[0]}
            for held, wanted in zip(coordinates(before), coordinates(after), strict=True):
                true.update(a for a in before.orders[0] if a in after.orders[0] and held[a] != wanted[a])
            self.assertEqual(crossed(before, after), true if length else set(), msg=f"{before} to {after}")
            seen.add((bool(true), len(true) == len(before.orders[0])))
        self.assertEqual(len(seen), 4)

    @parametrize("parts", [((4,), (2, 2)), ((2, 3), (3, 2)), ((2, 2, 3), (4, 3)), ((12,), (3, 4))])
    def test_same_pieces_are_the_same_runs(self, parts) -> None:
        answers = set()
        for length in range(1, 60):
            pieces = [pieces_of(length, some) for some in parts]
            for some, expected in zip(parts, pieces, strict=True):
                counted = list(runs(length, some))
                self.assertEqual([n for n, many in counted for _ in range(many)], expected)
                self.assertTrue(all(one[0] != other[0] for one, other in itertools.pairwise(counted)))
            same = pieces[0] == pieces[1]
            self.assertEqual(same_pieces(length, *parts), same, msg=f"{length}")
            answers.add(same)
        self.assertIn(True, answers)

    def test_ranks_that_want_nothing_may_count(self) -> None:
        """One element on two ranks: rank 1 wants nothing, and would have to cross if it did."""
        ends = [Regions.of((dim,), (None,), (1, 1), (2,)) for dim in (0, 1)]
        self.assertEqual(crossed(*ends), {0})


instantiate_parametrized_tests(TestCrossed)


def pieces_of(length: int, parts) -> list[int]:
    """What torch.chunk leaves of so many elements, cut by one after the other."""
    pieces = [torch.arange(length)]
    for count in parts:
        pieces = [piece for whole in pieces for piece in whole.chunk(count)]
    return [piece.numel() for piece in pieces if piece.numel()]


def coordinates(regions: Regions) -> list[dict[int, int]]:
    """For each element of the first dim, who holds it: the coordinate on each axis that cuts it."""
    pieces = [({}, torch.arange(regions.shape[0]))]
    for axis in regions.orders[0]:
        pieces = [
            ({**at, axis: i}, piece) for at, whole in pieces for i, piece in enumerate(whole.chunk(regions.sizes[axis]))
        ]
    return [at for at, piece in pieces for _ in range(piece.numel())]


class TestNearest(TestCase):
    def test_digits_say_what_a_count_says(self) -> None:
        rng, aligned = random.Random(1), 0
        for _ in range(100):
            asked = drawn(rng)
            for diagonals in ((), asked.diagonals()):
                said, counted = most_sent(asked, diagonals, 0), sent(asked, diagonals)
                if _cuts_nest(asked, 0):
                    aligned += 1
                    self.assertEqual(said, counted, msg=f"{asked}, {diagonals}")
                self.assertGreaterEqual(said, counted, msg=f"{asked}, {diagonals}")
        self.assertGreater(aligned, 50)

    @parametrize("old, new, kept", [((0, None), (None, None), 6), ((0, 0), (0, None), 2), ((0, 0), (None, None), 2)])
    def test_what_every_rank_keeps_is_not_sent(self, old, new, kept) -> None:
        asked = exchange(old, new, 12, (2, 3))
        self.assertEqual(most_sent(asked, (), kept), sent(asked, ()))

    @parametrize("length", [1, 5, 7])
    def test_of_uneven_cuts_no_rank_sends_more(self, length) -> None:
        for old, new in itertools.product(itertools.product((None, 0), repeat=2), repeat=2):
            asked = exchange(old, new, length, (2, 3))
            for diagonals in ((), asked.diagonals()):
                self.assertGreaterEqual(most_sent(asked, diagonals, 0), sent(asked, diagonals), msg=f"{old} to {new}")


instantiate_parametrized_tests(TestNearest)


@instantiate_parametrized_tests
class TestKept(TestCase):
    @parametrize("shape", [(12, 12), (7, 5), (1, 6), (6, 0)])
    @parametrize("sizes", [(2, 3), (2, 2)])
    def test_no_rank_has_less(self, shape, sizes) -> None:
        for old, new in pairs(mesh_dims=2):
            before, after = regions(old, shape, sizes), regions(new, shape, sizes)
            places = itertools.product(*map(range, sizes))
            true = min(before.box(place).meet(after.box(place)).elements for place in places)
            self.assertLessEqual(least_overlap(before, after), true, msg=f"{old} to {new}")
            if shape == (12, 12):  # all cuts are even
                self.assertEqual(least_overlap(before, after), true, msg=f"{old} to {new}")

    @parametrize("parts", [(3,), (2, 2), (3, 2), (2, 3, 2)])
    def test_the_lengths_of_pieces(self, parts) -> None:
        for length in range(30):
            pieces = (
                regions((0,) * len(parts), (length,), parts).span(0, at)[1]
                for at in itertools.product(*map(range, parts))
            )
            self.assertEqual(lengths(length, parts), set(pieces), msg=f"{length}")


def placed(*dims, shape=(16, 16)):
    """On a (2, 4) mesh."""
    return regions(dims, shape, (2, 4))


class TestCost(TestCase):
    @parametrize("shape", [(16, 16), (5, 3)])
    def test_no_rank_of_an_all_to_all_sends_or_gets_more(self, shape) -> None:
        for ends in pairs(mesh_dims=2):
            step = AllToAll(*(placed(*dims, shape=shape) for dims in ends), (0, 1))
            step = AllToAll(step.before, step.after, step.axes, diagonals=step.exchange.diagonals())
            out, into = [], []
            for own, place in enumerate(step.members((0, 0))):
                for pieces, most in ((step.sends(place), out), (step.receives(place), into)):
                    most.append(sum(piece.box.elements for piece in pieces if piece.member != own))
            for said, true in ((leaving(step), max(out)), (arriving(step), max(into))):
                self.assertGreaterEqual(said, true, msg=f"{ends}")
                self.assertTrue(said == true or shape != (16, 16), msg=f"{ends}: {said} of {true}")

    def test_of_equal_plans_the_first_is_taken(self) -> None:
        gather = AllGather(placed(None, 0), placed(None, None), (1,))
        plans = [(gather,), (gather, Narrow(placed(None, None), placed(0, None)))]
        self.assertIs(Cost().fastest(plans, 4), plans[0])
        twice = (
            AllGather(placed(0, 0), placed(0, None), (1,)),
            AllGather(placed(0, None), placed(None, None), (0,)),
        )
        once = (AllGather(placed(0, 0), placed(None, None), (0, 1)),)
        self.assertIs(Cost().fastest([twice, once], 4), once)


instantiate_parametrized_tests(TestCost)


class TestGroups(TestCase):
    def test_groups_within_and_between_sets_of_mesh_dims(self) -> None:
        sizes = (2, 3, 4)
        some, every = Groups.of(((0, 2), (1, 2), (0, 1, 2)), sizes), Groups.of(None, sizes)
        self.assertEqual(some.within((0, 1)), [(1,), (0,)])
        self.assertEqual(some.within((0, 1, 2))[:3], [(0, 1, 2), (1, 2), (0, 2)])
        self.assertEqual(every.within((0, 1)), [(0, 1), (1,), (0,)])
        self.assertEqual(some.between((2,), (0, 1, 2)), [(2,), (0, 2), (1, 2), (0, 1, 2)])
        self.assertEqual(every.between((2,), (0, 1, 2)), [(2,), (0, 1, 2)])

    def test_mesh_dims_are_covered_by_the_biggest_groups(self) -> None:
        for groups, cover in ((None, [(0, 1, 2)]), (((0, 2), (1, 2)), [(0, 2), (1,)]), ((), [(0,), (1,), (2,)])):
            self.assertEqual(Groups.of(groups, (2, 2, 2)).cover((0, 1, 2)), cover)

    def test_single_mesh_dims_always_have_a_group(self) -> None:
        some = Groups.of(((0, 2), (1, 2)), (2, 1, 4))
        self.assertEqual(some.axes, {(0, 2)})
        self.assertEqual([some.has(axes) for axes in ((), (2,), (2, 0), (0, 1))], [True, True, True, False])


def moved(source, target, shape=(16, 16)):
    """The steps, and the regions from which and to which they should lead."""
    before, after = (regions(spec, shape) for spec in (source, target))
    return move(before, after, Groups.of(None, SIZES), 4, Cost()), before, after


class TestMoves(TestCase):
    """All 729 pairs on a (2, 2, 2) mesh, all groups at hand."""

    @parametrize("shape", [(16, 16), (5, 3)])
    def test_every_rank_gets_its_box(self, shape) -> None:
        for ends in pairs():
            steps, before, after = moved(*ends, shape)
            self.assertTrue(is_right(steps, before, after), msg=f"{ends}: {steps}")
            self.assertLessEqual(collectives(steps), 1)

    def test_replicas_at_both_ends_take_no_part(self) -> None:
        for ends in pairs():
            steps, before, after = moved(*ends)
            talking = {axis for step in steps if isinstance(step, Collective) for axis in step.axes}
            self.assertLessEqual(crossed(before, after), talking)
            self.assertLessEqual(talking, before.sharded | after.sharded)

    def test_what_replicas_have_is_cut_before_it_is_gathered(self) -> None:
        steps, *_ = moved((None, 0, None), (1, None, None))
        self.assertEqual([*map(type, steps)], [Narrow, AllGather])

    @parametrize("rows, kind", [(8, AllGather), (7, AllGather), (5, AllToAll), (1, AllToAll)])
    def test_a_gather_has_little_padding(self, rows, kind) -> None:
        (step,) = moved((0, 0, 0), (None, None, None), (rows, 1))[0]
        self.assertIs(type(step), kind)


instantiate_parametrized_tests(TestMoves)


class TestBalanced(TestCase):
    @parametrize("size", [4, 8])
    def test_replicas_share_the_sending(self, size) -> None:
        shape, sizes = (size**2 << 20,), (size, size)
        before, after = (Regions.of(dims, (None, None), shape, sizes) for dims in ((None, 0), (0, None)))
        (step,) = move(before, after, Groups.of(None, sizes), 4, Cost())
        self.assertEqual(step.axes, (0, 1))
        self.assertEqual(leaving(step), after.most)
        (nearest,) = move(before, after, Groups.of((), sizes), 4, Cost())
        self.assertEqual(nearest.axes, (1,))
        self.assertEqual(leaving(nearest), (size - 1) * after.most)

    def test_small_data_goes_over_the_smaller_group(self) -> None:
        before, after = (Regions.of(dims, (None, None), (16,), (4, 4)) for dims in ((None, 0), (0, None)))
        (step,) = move(before, after, Groups.of(None, (4, 4)), 4, Cost())
        self.assertEqual(step.axes, (1,))

    @parametrize("shape", [(16, 16), (5, 3)])
    def test_every_all_to_all_brings_every_rank_its_box(self, shape) -> None:
        """Of all 729 pairs on a (2, 2, 2) mesh, also those that aren't taken."""
        groups = Groups.of(None, SIZES)
        for source, target in pairs():
            before, after = regions(source, shape), regions(target, shape)
            axes = tuple(sorted(crossed(before, after)))
            for step in all_to_alls(Exchange(before, after, axes), before.free, groups) if axes else ():
                self.assertTrue(is_right((step,), before, after), msg=f"{source} to {target}: {step}")
                self.assertLessEqual({*axes}, {*step.axes})


instantiate_parametrized_tests(TestBalanced)


class TestTurns(TestCase):
    """All 729 pairs on a (2, 2, 2) mesh."""

    @parametrize("shape", [(16, 16), (5, 3)])
    @parametrize("groups", [(), ((0, 1, 2),), ((0, 1), (1, 2))])
    def test_every_rank_gets_its_box(self, shape, groups) -> None:
        joint = {frozenset(group) for group in groups}
        for source, target in pairs():
            before, after = regions(source, shape), regions(target, shape)
            steps = move(before, after, Groups.of(groups, SIZES), 4, Cost())
            self.assertTrue(is_right(steps, before, after), msg=f"{source} to {target}: {steps}")
            self.assertLessEqual(collectives(steps), 3)
            for step in steps:
                if isinstance(step, Collective):
                    self.assertTrue(len(step.axes) == 1 or {*step.axes} in joint, msg=f"{source} to {target}: {step}")

    @parametrize(
        "source, target, axes", [((None, 0, 1), (0, None, None), [(1,), (2,)]), ((0, 1, None), (1, 0, 0), [(0, 1, 2)])]
    )
    def test_a_bigger_group_may_be_slower_than_two(self, source, target, axes) -> None:
        """No group is over just the two mesh dims that communicate, but one contains them."""
        before, after = regions(source, (16, 16)), regions(target, (16, 16))
        steps = move(before, after, Groups.of(((0, 1, 2),), SIZES), 4, Cost())
        self.assertEqual([step.axes for step in steps if isinstance(step, Collective)], axes)

    def test_a_group_gives_up_cuts_and_makes_those_that_fit(self) -> None:
        before, after = regions((0, 1, None), (16, 16)), regions((1, 0, None), (16, 16))
        steps = move(before, after, Groups.of((), SIZES), 4, Cost())
        self.assertEqual([(type(step), step.axes) for step in steps], [(AllGather, (0,)), (AllToAll, (1,))])


instantiate_parametrized_tests(TestTurns)


if __name__ == "__main__":
    run_tests()
