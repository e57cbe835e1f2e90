"""The pure half of a transfer, on all ranks in one process: right bytes, none already there, balanced, in few."""

import itertools
import math

import pytest

from flow_twin import least_sent
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.transfers._planner.routes import Move
from torch_overlay.transfers._planner.schedule import Large, Schedule
from torch_overlay.transfers._planner.sides import Ranks, Side
from transfer_twin import carry_out, draw, lacking
from width import NIGHTLY, sample

TIMES = 10 if NIGHTLY else 1
LONG = (0, 1, 24, 30, 48, 50)


@pytest.mark.parametrize("seed", range(6 * TIMES))
def test_targets_are_whole_and_each_missing_byte_comes_once(seed):
    for number in range(50):
        tensors = draw(1000 * seed + number)
        wanted, lacked = lacking(tensors, 8)
        done = carry_out(tensors, 8, 1 << 20)
        assert done.wrong is None, tensors
        assert done.received == lacked and sum(done.sent) == sum(wanted.values()), tensors
        assert done.count == 1


@pytest.mark.parametrize("seed", range(2 * TIMES))
@pytest.mark.parametrize("large", [Large(1, 50), Large(64, 100), Large(16, 1 << 20)])
def test_large_pieces_travel_by_themselves(seed, large):
    """Both ranks cut alike, no element comes twice, and the budget holds, since it counts as if all were packed."""
    for number in range(20):
        tensors = draw(20_000 + 1000 * seed + number)
        done = carry_out(tensors, 8, 2000, large)
        assert done.wrong is None and done.staged <= 2000, tensors


@pytest.mark.parametrize("seed", range(3 * TIMES))
@pytest.mark.parametrize("budget", [2000, 3000])
def test_many_exchanges_stay_within_the_budget(seed, budget):
    most = 0
    for number in range(20):
        tensors = draw(5000 + 1000 * seed + number, lengths=(3, 8, 12, 16))
        done = carry_out(tensors, 8, budget)
        assert done.wrong is None, tensors
        assert done.staged <= budget, tensors
        most = max(most, done.count)
    assert most > 3


@pytest.mark.parametrize("seed", list(sample(range(15 * TIMES), 4)))
def test_the_busiest_port_is_near_the_optimum_of_the_flow(seed):
    """Within a tenth, over all tensors together, on 300 pairs of meshes. The flow may cut an element, so where a rank
    has fewer than twenty of them to send, one of each tensor is let go; these pairs are none of the 300."""
    large = itertools.count()
    for number in itertools.count():
        tensors = draw(10_000 + 100 * seed + number, lengths=LONG, dims=2)
        schedules = [Schedule.of([tensor.move() for tensor in tensors], rank) for rank in range(8)]
        wanted, lacked = lacking(tensors, 8)
        assert [schedule.received for schedule in schedules] == lacked
        elements = sum([tensor.itemsize for tensor in tensors])
        is_large = sum(wanted.values()) >= 8 * 20 * elements
        most = 1.1 * least_sent(wanted, 8) + (0 if is_large else elements)
        assert max([schedule.sent for schedule in schedules]) <= most, tensors
        if is_large and next(large) == 9:
            return


@pytest.mark.parametrize("seed", range(4 * TIMES))
def test_ranks_that_are_gone_send_nothing_and_nothing_else_lacks(seed):
    """To each rank that stays comes what it lacks, from ranks that stay; or the loss is noticed."""
    lost = 0
    for number in range(40):
        tensors = [t for t in draw(30_000 + 1000 * seed + number) if not {0, 1} & {*t.target.ranks}]
        gone = frozenset((0, 1))
        moves = [tensor.move() for tensor in tensors]
        held = [[{e for r in t.source.ranks if r > 1 for e in t.source.held(t.shape, r)}, t.shape] for t in tensors]
        whole = [len(elements) == math.prod(shape) for elements, shape in held]
        assert [not move.source.lost(gone) for move in moves] == whole, tensors
        lost += whole.count(False)
        kept = [tensor for tensor, is_whole in zip(tensors, whole) if is_whole]
        done = carry_out(kept, 8, 1 << 20, gone=gone)
        assert done.wrong is None and done.sent[:2] == [0, 0], kept
        assert done.received == lacking(kept, 8)[1]
    assert lost


def model(ranks, targets, first, stages=8, lanes=8, odd=0):
    """1,000 tensors of a transformer with experts, FSDP x TP x PP on the first ranks, to EP x TP on others."""
    many = ranks // stages
    cut = ranks // stages // lanes
    meshes = [Ranks.of(range(stage * many, (stage + 1) * many), (cut, lanes)) for stage in range(stages)]
    serve = Ranks.of(range(first, first + targets), (targets // lanes, lanes))
    wide = 4096 + odd
    kinds = (
        [((wide, wide), 0, 0)] * 4 + [((wide,), None, None)] * 2 + [((4 * wide, wide), 0, 0), ((wide, 4 * wide), 1, 1)]
    )
    kinds += [((64, wide, wide // 4), 0, None)] * 3 + [((wide, wide), 1, 1)]
    moves = []
    for number in range(1000):
        shape, split, lane = kinds[number % 12]
        source = Regions.of((0, split), (None, None), shape, (cut, lanes))
        target = Regions.of((0 if len(shape) == 3 else None, lane), (None, None), shape, (targets // lanes, lanes))
        stage = min(number // 12 * stages // 84, stages - 1)
        moves.append(Move(Side(source, meshes[stage]), Side(target, serve), 2))
    return moves


def boxes_looked_at(moves, rank, monkeypatch):
    """How many boxes a plan on one rank computes, and how many pieces it has."""
    looked = []
    with monkeypatch.context() as patched:
        box = Side.box
        patched.setattr(Side, "box", lambda self, coordinate: looked.append(1) or box(self, coordinate))
        schedule = Schedule.of(moves, rank)
    items = [item for streams in (schedule.sends, schedule.receives) for s in streams.values() for item in s.items]
    return len(looked), sum([len(item.tensors) for item in items])


@pytest.mark.parametrize("ranks, targets", [(64, 16), (256, 64), (1024, 256)])
def test_a_plan_costs_what_the_rank_sends_and_gets(ranks, targets, monkeypatch):
    """1,000 tensors from FSDP x TP x PP to EP x TP: no rank looks at the boxes of ranks that it doesn't deal with."""
    moves = model(ranks, targets, ranks)
    for rank in (5, ranks + 5):
        looked, pieces = boxes_looked_at(moves, rank, monkeypatch)
        assert 0 < looked <= pieces + 3 * 1000
