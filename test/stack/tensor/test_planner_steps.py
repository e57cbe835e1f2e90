# Owner(s): ["oncall: distributed"]
"""Steps of a plan, and who sends what."""

import itertools
from collections import Counter

from planner_simulator import MOVED, exchange, is_right, pairs, regions, sent
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.steps import (
    AllToAll,
    Exchange,
    Narrow,
    ReduceScatter,
)

TWO_BY_THREE = (2, 3)


def ends(old, new, shape=(5, 4)):
    return regions(old, shape, TWO_BY_THREE), regions(new, shape, TWO_BY_THREE)


class TestStepSimulator(TestCase):
    def test_what_is_wrong_is_seen(self) -> None:
        before, after = ends((None, "sum"), (None, 0))
        self.assertFalse(is_right([ReduceScatter(before, after, (1,), "max")], before, after))
        self.assertFalse(is_right([Narrow(*ends((None, None), (None, 0)))], before, after))


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


instantiate_parametrized_tests(TestDigits)


class TestUnlike(TestCase):
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
