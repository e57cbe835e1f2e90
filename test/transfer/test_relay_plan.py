"""Relays, planned: carried out on sets of elements for all ranks in one process."""

import itertools
import math
import random
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.transfers._planner import relay
from torch_overlay.transfers._planner.boxes import blocks
from torch_overlay.transfers._planner.piece_moves import Listed, OnMesh, Pieced, PieceMove
from torch_overlay.transfers._planner.relay import Relay, RelayTurns
from torch_overlay.transfers._planner.schedule import Schedule
from torch_overlay.transfers._planner.sides import Ranks, Side
from torch_overlay.transfers.descriptions import Tensor
from torch_overlay.transfers.hops import overlapping
from torch_overlay.transfers.hosts import Links, passes_on
from torch_overlay.transfers.relays import relays_of
from torch_overlay.transfers.sharding import replicated_sharding
from width import NIGHTLY

WORLD = 8


def elements_of(box):
    return [*itertools.product(*[range(start, start + length) for start, length in zip(*box, strict=True)])]


def any_end(rng, shape, must_cover):
    """Who has what: a mesh, or boxes of any kind."""
    if shape and rng.random() < 0.5:
        sizes = rng.choice([(2, 2), (4,), (2, 4), (3, 2), (8,)])
        orders = [()] * len(shape)
        for axis in range(len(sizes)):
            if rng.random() < 0.5:
                dim = rng.randrange(len(shape))
                orders[dim] = (*orders[dim], axis)
        ranks = rng.sample(range(WORLD), math.prod(sizes))
        return OnMesh(Side(Regions(shape, sizes, tuple(orders), (None,) * len(sizes)), Ranks.of(ranks, sizes)))
    given = {}
    boxes = [Box((0,) * len(shape), shape)] if must_cover else []
    for _ in range(rng.randint(0 if boxes else 1, 6)):
        ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
        boxes.append(Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends)))
    for box in boxes:
        for rank in rng.sample(range(WORLD), rng.randint(1, 5)):
            given.setdefault(rank, []).append(box)
    return Listed([(rank, enumerate(some)) for rank, some in given.items()])


class TestRelayPlan(TestCase):
    def carry_out(self, pieces, before):
        """What each rank has after a hop of what its target has memory for, given what it has before. Asserts that
        both ends of a message agree, that a rank sends what it has, and that no element comes twice to a piece."""
        after = {rank: {} for rank in range(WORLD)}
        messages = {}
        for rank in range(WORLD):
            for numbers, (sends, receives, kept) in sorted(pieces.routes_of(rank).items()):
                for share in sends:
                    messages.setdefault((rank, share.peer, *numbers), [[], []])[0].append(share[1:])
                for share in receives:
                    messages.setdefault((share.peer, rank, *numbers), [[], []])[1].append(share[1:])
                for box in kept:
                    after[rank].setdefault(numbers[1], set()).update(elements_of(box))
                    self.assertTrue(before[rank].get(numbers[0], set()).issuperset(elements_of(box)))
        came = dict.fromkeys(range(WORLD), 0)
        for (sender, receiver, one, other), (sends, receives) in messages.items():
            self.assertEqual(sends, receives)
            self.assertNotEqual(sender, receiver)
            for box, first, last in sends:
                some = {each for part in blocks(box, first, last) for each in elements_of(part)}
                self.assertTrue(before[sender].get(one, set()) >= some, "it sends what it has")
                there = after[receiver].setdefault(other, set())
                self.assertFalse(there & some, "an element comes twice")
                there |= some
                came[receiver] += len(some)
        return after, came, messages

    def check(self, seed):
        rng = random.Random(seed)
        shape = tuple(rng.choice((1, 2, 3, 6, 8)) for _ in range(rng.randint(0, 3)))
        source, target = any_end(rng, shape, True), any_end(rng, shape, False)
        turn = RelayTurns().next(target, 2)
        held = {r: {n: {*elements_of(box)} for n, box in source.held(r)} for r in range(WORLD)}
        wanted = {r: {n: {*elements_of(box)} for n, box in target.held(r)} for r in range(WORLD)}
        own = {rank: set().union(*pieces.values()) for rank, pieces in held.items()}
        if turn is None:
            every = [each for pieces in wanted.values() for piece in pieces.values() for each in piece]
            self.assertEqual(len(every), len({*every}), "no two ranks want the same")
            return
        hosts = {}
        if rng.random() < 0.6:
            hosts = {rank: f"host {rng.randrange(3)}" for rank in range(WORLD)}
        whole = Relay.of(shape, (source, target), range(WORLD), 2, turn, hosts)
        have, came, first = held, dict.fromkeys(range(WORLD), 0), 0
        for number, pieces in enumerate((Pieced(shape, source, whole.first), *whole.hops)):
            after, each, messages = self.carry_out(pieces, have)
            for rank, some in have.items() if number else ():  # the same tensors as after the hop before
                for piece, there in some.items():
                    after[rank].setdefault(piece, set()).update(there)
            if number == 0:
                first = self.elements(messages.items())
            self.assertTrue(number < 2 or all(hosts[one] == hosts[other] for one, other, *_ in messages))
            have = after
            came = {rank: came[rank] + each[rank] for rank in came}
        self.assertEqual(_filled(have), _filled(wanted))
        everything = set().union(*[piece for pieces in wanted.values() for piece in pieces.values()])
        in_place = set().union(*[own[rank] & piece for rank in wanted for piece in wanted[rank].values()])
        if isinstance(target, OnMesh):  # of boxes that overlap, elements in place may come to a box of another rank
            self.assertEqual(first, len(everything - in_place), "each element leaves the source once")
            for rank in range(WORLD):
                lacking = set().union(*wanted[rank].values()) - own[rank]
                self.assertEqual(came[rank], len(lacking), "each element comes once")
        else:
            self.assertTrue(len(everything - in_place) <= first <= len(everything))

    def elements(self, messages):
        """How many there are in messages."""
        return sum(last - begin for _, (sends, _) in messages for _, begin, last in sends)

    def test_each_element_crosses_to_a_host_once(self):
        """Two trainers, two hosts of three replicas, or of three ranks that hold a third each: by each rank's plan."""
        shape, hosts = (6, 10), {rank: f"host {rank // 5}" for rank in range(2, 8)}
        source = OnMesh(Side(Regions(shape, (2,), ((0,), ()), (None,)), Ranks.of((0, 1), (2,))))
        for orders, copies in ((((), ()), 3), (((1,), ()), 1)):
            target = OnMesh(Side(Regions(shape, (2, 3), orders, (None, None)), Ranks.of(range(2, 8), (2, 3))))
            whole = Relay.of(shape, (source, target), range(2, 8), 2, 0, hosts)
            crossed = {"host 0": 0, "host 1": 0}
            for pieces in (Pieced(shape, source, whole.first), *whole.hops):
                for rank in range(8):
                    for _, receives, _ in pieces.routes_of(rank).values():
                        for peer, _, first, last in receives:
                            if hosts.get(peer) != hosts[rank]:
                                crossed[hosts[rank]] += last - first
            self.assertEqual(crossed, {"host 0": 60, "host 1": 60}, f"{copies} replicas on each host")

    def test_256_trainers_and_64_replicas_of_8(self):
        """Each rank gets a stripe, and passes it on to the 63 others that want the same."""
        shape, sizes = (4096, 4096), (64, 8)
        source = OnMesh(Side(Regions(shape, (256,), ((0,), ()), (None,)), Ranks.of(range(256), (256,))))
        target = OnMesh(Side(Regions(shape, sizes, ((1,), ()), (None, None)), Ranks.of(range(256, 768), sizes)))
        whole = Relay.of(shape, (source, target), range(256, 768), 2, 0, {})
        first = Pieced(shape, source, whole.first, memory=(source, target))
        hops = [PieceMove(pieces, (0, 0), 2, ()) for pieces in (first, *whole.hops)]
        one, other = ([Schedule.of([hop], rank) for hop in hops] for rank in (0, 256))
        self.assertEqual([each.sent for each in one], [shape[0] * shape[1] * 2 // 256, 0])
        size = shape[0] * shape[1] * 2 // 8
        self.assertEqual([other[0].received, other[1].received], [size // 64, size // 64 * 63])
        self.assertEqual(other[1].sent, size // 64 * 63)


def _filled(pieces):
    return {rank: {number: each for number, each in some.items() if each} for rank, some in pieces.items()}


for first in range(0, 20_000 if NIGHTLY else 400, 400):

    def check(self, seeds=range(first, first + 400)):
        for seed in seeds:
            with mock.patch.object(relay, "STRIPE", (1, 4, 100)[seed % 3]), self.subTest(seed=seed):
                self.check(seed)

    setattr(TestRelayPlan, f"test_random_plans_{first:05}", check)


def test_ranks_that_are_gone_have_no_host():
    """They are in the mesh of the source, and not among those that say where they are."""
    shape = (1 << 20,)
    source = replicated_sharding("float32", shape, (0, 1), "cpu")
    target = replicated_sharding("float32", shape, (2, 3, 4, 5), "cpu")
    tensors, hosts = [Tensor("w", source, target)], {0: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    direct, relayed = Links.of(tensors, hosts)
    assert (direct.busiest, relayed.busiest) == (4 * 4 << 20, 4 << 20)
    assert passes_on(tensors, hosts) == (
        True,
        "between 3 hosts elements are passed on, so that the busiest host's link has 4 MiB and not 16 MiB",
    )
    assert [passing.relay is not None for passing in relays_of(tensors, hosts)["w"]] == [True]
    assert passes_on(tensors, dict.fromkeys(hosts, "a")) == (False, "")


def test_boxes_that_overlap_are_found_as_one_by_one():
    rng = random.Random(7)
    for _ in range(200):
        ndim = rng.randrange(4)
        boxes = set()
        for number in range(rng.randrange(1, 12)):
            start = tuple([rng.randrange(6) for _ in range(ndim)])
            boxes.add((number % 5, Box(start, tuple([rng.randrange(1, 5) for _ in range(ndim)]))))
        wanted = {(first, second) for first, one in boxes for second, other in boxes if one.meet(other).elements}
        assert overlapping(boxes, ndim) == wanted


if __name__ == "__main__":
    run_tests()
