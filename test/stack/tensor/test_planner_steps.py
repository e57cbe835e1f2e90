# Owner(s): ["oncall: distributed"]
"""Steps of a plan, and who sends what."""

import itertools
from collections import Counter

from planner_simulator import MOVED, REDUCE, exchange, is_right, pairs, regions, sent
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.senders import Digit, Exchange, primes
from torch_overlay.distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
    Step,
)

TWO_BY_THREE = (2, 3)


def ends(old, new, shape=(5, 4)):
    return regions(old, shape, TWO_BY_THREE), regions(new, shape, TWO_BY_THREE)


@instantiate_parametrized_tests
class TestStepSimulator(TestCase):
    def check(self, *steps, to=None) -> None:
        self.assertTrue(is_right(steps, steps[0].before, to or steps[-1].after), msg=f"{steps}")

    @parametrize("op", [*REDUCE])
    def test_reductions(self, op) -> None:
        before, after = ends((0, op), (0, None))
        self.check(AllReduce(before, before, (1,), op), to=after)
        self.check(ReduceScatter(*ends((None, op), (None, 0)), (1,), op))
        self.check(ReduceScatter(*ends((op, op), (1, 1)), (0, 1), op))

    def test_gathers(self) -> None:
        self.check(AllGather(*ends((0, 0), (None, None)), (0, 1)))
        self.check(AllGather(*ends((0, 0), (0, None)), (1,)))
        self.check(AllGather(*ends((1, 0), (None, None)), (0, 1)))

    def test_local_steps(self) -> None:
        self.check(Narrow(*ends((0, None), (0, 1))))
        (shards, whole), terms = ends((0, 0), (None, None)), regions(("sum", "sum"), (5, 4), TWO_BY_THREE)
        self.check(Embed(shards, whole), to=terms)
        self.check(AllGather(shards, whole, (0, 1)), Divide(6), to=terms)

    def test_what_is_wrong_is_seen(self) -> None:
        before, after = ends((None, "sum"), (None, 0))
        self.assertFalse(is_right([ReduceScatter(before, after, (1,), "max")], before, after))
        self.assertFalse(is_right([Narrow(*ends((None, None), (None, 0)))], before, after))


def regions_of_four(dims, shape) -> Regions:
    """On a (2, 2) mesh."""
    return Regions.of(dims, (None, None), shape, (2, 2))


class TestSteps(TestCase):
    """Steps as values."""

    def test_a_narrow_finds_what_is_wanted_in_the_local_tensor(self) -> None:
        step = Narrow(regions_of_four((0, None), (5, 4)), regions_of_four((0, 1), (5, 4)))
        self.assertEqual([*step.box((1, 1))], [(0, 2), (2, 2)])
        nothing = Narrow(regions_of_four((None, None), (1, 4)), regions_of_four((0, None), (1, 4)))
        self.assertEqual([*nothing.box((1, 0))], [(0, 0), (0, 4)])

    def test_an_embedded_shard_lies_where_it_was(self) -> None:
        step = Embed(regions_of_four((0, 1), (5, 4)), regions_of_four((None, 1), (5, 4)))
        self.assertEqual([*step.box((1, 1))], [(3, 0), (2, 2)])
        nothing = Embed(regions_of_four((0, None), (1, 4)), regions_of_four((None, None), (1, 4)))
        self.assertEqual([*nothing.box((1, 0))], [(0, 0), (0, 4)])

    def test_local_steps_are_values(self) -> None:
        ends = regions_of_four((None, None), (4, 4)), regions_of_four((0, None), (4, 4))
        again = regions_of_four((None, None), (4, 4)), regions_of_four((0, None), (4, 4))
        self.assertEqual({Divide(2), Narrow(*ends)}, {Divide(2), Narrow(*again)})


def cells(box) -> list[tuple[int, ...]]:
    """The elements of a box, by their indices."""
    return [*itertools.product(*(range(start, start + n) for start, n in zip(*box, strict=True)))]


class TestCollectives(TestCase):
    def test_what_an_all_reduce_brings(self) -> None:
        whole = regions_of_four((None, None), (5, 2))
        self.assertEqual(AllReduce(whole, whole, (0,), "sum").received, 10)
        self.assertEqual(AllReduce(whole, whole, (0, 1), "sum").received, 15)

    def test_steps_are_values(self) -> None:
        steps: list[Step] = [Divide(2), AllReduce(*[regions_of_four((None, 0), (5, 2))] * 2, (0,), "sum")]
        again: list[Step] = [Divide(2), AllReduce(*[regions_of_four((None, 0), (5, 2))] * 2, (0,), "sum")]
        self.assertEqual([*map(hash, steps)], [*map(hash, again)])
        self.assertEqual(steps, again)

    @parametrize("length", [4, 5, 1])
    def test_a_gather_puts_every_piece_in_its_place(self, length) -> None:
        step = AllGather(regions_of_four((0, 0), (length, 2)), regions_of_four((None, None), (length, 2)), (0, 1))
        there = [cell for piece in step.pieces((1, 0)) for cell in cells(piece.box)]
        self.assertEqual(there, [*itertools.product(range(length), range(2))])

    def test_what_a_scatter_gives_away_is_what_others_keep(self) -> None:
        step = ReduceScatter(regions_of_four((None, None), (5, 2)), regions_of_four((0, 0), (5, 2)), (0, 1), "sum")
        self.assertEqual([piece.member for piece in step.pieces((0, 1))], [0, 1, 2, 3])
        for piece in step.pieces((0, 1)):
            member = step.members((0, 1))[piece.member]
            self.assertEqual(cells(piece.box), cells(step.after.box(member)))

    def test_a_box_counts_from_the_start_of_the_local_tensor(self) -> None:
        """Of rows 3 and 4, since mesh dim 0, which isn't in the group, cuts both ends."""
        outer, inner = regions_of_four((0, None), (5, 2)), regions_of_four((0, 0), (5, 2))
        pieces = [(0, ((0, 0), (1, 2))), (1, ((1, 0), (1, 2)))]
        for step in (AllGather(inner, outer, (1,)), ReduceScatter(outer, inner, (1,), "sum")):
            self.assertEqual([(piece.member, piece.box) for piece in step.pieces((1, 0))], pieces)


instantiate_parametrized_tests(TestCollectives)


class TestSenders(TestCase):
    """A replica becomes a shard and a shard a replica: only ranks (i, i) hold what others want of their nearest."""

    @parametrize("size", [2, 3, 4, 8])
    def test_each_rank_sends_to_one(self, size) -> None:
        asked = exchange((None, 0), (0, None), size * size, (size, size))
        senders = []
        for i, j in itertools.product(range(size), repeat=2):
            sender = [i, i]  # holds what rank (i, j) wants, and is its nearest sender
            for diagonal in asked.diagonals():
                diagonal.follow(sender, (i, j))
            self.assertEqual(sender[1], i, msg="another replica of the same shard")
            self.assertTrue(i != j or sender == [i, j], msg="what a rank holds isn't sent")
            senders.append(sender)
        self.assertEqual(sorted(senders), [[i, j] for i in range(size) for j in range(size)])

    def test_without_replicas_there_is_nothing_to_choose(self) -> None:
        self.assertEqual(exchange((0, 0), (None, 0), 16, (2, 2)).diagonals(), ())


instantiate_parametrized_tests(TestSenders)


class TestDigits(TestCase):
    def check(self, asked: Exchange) -> None:
        """On diagonals, each rank has one sender for each shard, and no rank sends more than one receives."""
        sizes, sent = asked.before.sizes, Counter()
        for wanting in itertools.product(*map(range, sizes)):
            start, wanted = asked.after.span(0, wanting)
            shards = [range(size) if axis in asked.shards else (wanting[axis],) for axis, size in enumerate(sizes)]
            for nearest in itertools.product(*shards):
                sender = [*nearest]
                for diagonal in asked.diagonals():
                    diagonal.follow(sender, wanting)
                self.assertTrue(all(sender[axis] == nearest[axis] for axis in asked.shards), msg="another replica")
                self.assertTrue(nearest != wanting or sender == [*wanting], msg="a rank is its own sender")
                first, held = asked.before.span(0, sender)
                if tuple(sender) != wanting:
                    sent[tuple(sender)] += max(0, min(start + wanted, first + held) - max(start, first))
        self.assertLessEqual(max(sent.values(), default=0), asked.after.most, msg=f"{asked}")

    @parametrize("sizes", [(2, 4), (4, 2), (6, 2), (6, 6), (12, 12)])
    def test_of_even_cuts_no_rank_sends_more_than_one_receives(self, sizes) -> None:
        self.check(exchange((None, 0), (0, None), sizes[0] * sizes[1], sizes))

    @parametrize("sizes", [(2, 2, 2), (2, 4)])
    def test_nor_does_one_between_any_two_cuts(self, sizes) -> None:
        for old, new in itertools.product(itertools.product((None, 0), repeat=len(sizes)), repeat=2):
            self.check(exchange(old, new, 16, sizes))

    def test_a_digit_is_paired_with_one_of_its_base(self) -> None:
        (first, *_) = exchange((None, 0), (0, None), 24, (4, 6)).diagonals()
        self.assertEqual(first, (Digit(0, 2, 2), Digit(1, 3, 2)))

    def test_digits_make_up_the_coordinate(self) -> None:
        asked = exchange((None, 0), (0, None), 24, (12, 2))
        digits = asked.cuts((0,))
        self.assertEqual(digits, [Digit(0, 6, 2), Digit(0, 3, 2), Digit(0, 1, 3)])
        for at in range(12):
            self.assertEqual(sum(digit.of((at, 0)) * digit.unit for digit in digits), at)

    def test_primes(self) -> None:
        self.assertEqual([primes(number) for number in (1, 2, 12, 49, 97)], [[], [2], [2, 2, 3], [7, 7], [97]])


instantiate_parametrized_tests(TestDigits)


class TestUnlike(TestCase):
    def test_an_equal_base_comes_first(self) -> None:
        asked = exchange((None, 0), (0, None), 24, (4, 6))
        self.assertEqual([(d.replica.base, d.shard.base) for d in asked.diagonals()], [(2, 2), (2, 3)])

    @parametrize("sizes, alike, all_digits", [((2, 3), 24, 12), ((4, 6), 72, 48), ((3, 8), 126, 72), ((3, 9), 54, 54)])
    def test_more_replicas_send(self, sizes, alike, all_digits) -> None:
        asked = exchange((None, 0), (0, None), 6 * sizes[0] * sizes[1], sizes)
        diagonals = asked.diagonals()
        self.assertEqual(sent(asked, [d for d in diagonals if d.replica.base == d.shard.base]), alike)
        self.assertEqual(sent(asked, diagonals), all_digits)

    @parametrize("sizes", [(3, 2), (2, 3, 2)])
    def test_no_rank_ever_sends_more_for_it(self, sizes) -> None:
        cuts = [*itertools.product((None, 0), repeat=len(sizes))]
        for old, new, length in itertools.product(cuts, cuts, (1, 6, 7, 12, 25)):
            asked = exchange(old, new, length, sizes)
            diagonals = asked.diagonals()
            alike = [d for d in diagonals if d.replica.base == d.shard.base]
            self.assertLessEqual(sent(asked, diagonals), sent(asked, alike), msg=f"{old} to {new} of {length}")


instantiate_parametrized_tests(TestUnlike)


def cells_inside(box, held=None) -> list[tuple[int, ...]]:
    """The elements of a box, by their indices; of a box inside ``held``, which counts from its start."""
    origin = held.start if held is not None else (0,) * len(box.start)
    ranges = [range(o + s, o + s + n) for o, s, n in zip(origin, box.start, box.length, strict=True)]
    return [*itertools.product(*ranges)]


class TestExchange(TestCase):
    """All-to-alls over all mesh dims, as values."""

    @parametrize("sizes", [(2, 2), (2, 3)])
    @parametrize("shape", [(4, 6), (5, 3), (1, 2)])
    @parametrize("balanced", [False, True])
    def test_an_all_to_all_brings_each_element_once(self, sizes, shape, balanced) -> None:
        """From the nearest replica, or from one on a diagonal."""
        places = [*itertools.product(*map(range, sizes))]
        for old, new in pairs(mesh_dims=2):
            before, after = regions(old, shape, sizes), regions(new, shape, sizes)
            step = AllToAll(before, after, (0, 1))
            if balanced:
                step = AllToAll(before, after, (0, 1), diagonals=step.exchange.diagonals())
            counts = [sum(len(pieces(place)) for place in places) for pieces in (step.sends, step.receives)]
            self.assertEqual(*counts, msg=f"{old} to {new}: what is sent and what is received")
            for place in places:
                wanted, came = after.box(place), []
                for piece in step.receives(place):
                    sender = step.members(place)[piece.member]
                    (sent,) = [one for one in step.sends(sender) if step.members(sender)[one.member] == place]
                    got = cells_inside(piece.box, wanted)
                    self.assertEqual(
                        got, cells_inside(sent.box, before.box(sender)), msg=f"{old} to {new}, {sender} to {place}"
                    )
                    came += got
                self.assertEqual(sorted(came), cells_inside(wanted), msg=f"{old} to {new} at {place}")

    def test_on_a_diagonal_each_rank_sends_to_one(self) -> None:
        exchange = Exchange(*(regions(spec, (16, 1), (4, 4)) for spec in ((None, 0), (0, None))), (0, 1))
        for diagonals, most in (((), 4), (exchange.diagonals(), 1)):
            step = AllToAll(exchange.before, exchange.after, exchange.axes, diagonals=diagonals)
            self.assertEqual(max(len(step.sends(place)) for place in step.members((0, 0))), most)


instantiate_parametrized_tests(TestExchange)


class TestExchangeTerms(TestCase):
    @parametrize("sizes", [(2, 2), (2, 3)])
    @parametrize("op", ["sum", "max"])
    def test_an_all_to_all_reduces_what_it_brings(self, sizes, op) -> None:
        for source, target in pairs((*MOVED, op), MOVED, 2):
            before, after = regions(source, (4, 5), sizes), regions(target, (4, 5), sizes)
            reduced = tuple(sorted(before.pending))
            for diagonals in ((), Exchange(before, after, (0, 1), reduced).diagonals()):
                step = AllToAll(before, after, (0, 1), op, reduced, diagonals)
                self.assertTrue(is_right([step], before, after), msg=f"{source} to {target}: {diagonals}")

    def test_terms_come_in_one_order_on_all_ranks(self) -> None:
        """A replica dim and the pending one make a diagonal, so that ranks in the order of `members` would reduce in
        different orders."""
        ends = regions((None, "sum", 0), (16, 4)), regions((0, None, None), (16, 4))
        step = AllToAll(*ends, (0, 1, 2), "sum", (1,), Exchange(*ends, (0, 1, 2), (1,)).diagonals())
        for place in itertools.product(range(2), repeat=3):
            terms = [step.members(place)[piece.member][1] for piece in step.receives(place)]
            self.assertEqual(terms, [0, 1], msg=f"{place}")


instantiate_parametrized_tests(TestExchangeTerms)


if __name__ == "__main__":
    run_tests()
