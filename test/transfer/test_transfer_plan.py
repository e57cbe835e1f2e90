"""The pure half of a transfer, on all ranks in one process: right bytes, none already there, balanced, in few."""

import itertools
import math

import pytest

from flow_twin import least_sent
from torch_overlay.distributed.tensor._planner.regions import Box, Regions
from torch_overlay.transfers._planner.balance import balance, filled
from torch_overlay.transfers._planner.routes import Move
from torch_overlay.transfers._planner.schedule import Large, Load, Schedule, blocks
from torch_overlay.transfers._planner.sides import Ranks, Side
from transfer_twin import End, Tensor, carry_out, draw, lacking
from width import NIGHTLY

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


def test_a_large_piece_is_cut_into_messages_between_rows():
    tensor = Tensor((100, 7), 4, End((0,), (1,), (("R",),)), End((1,), (1,), (("R",),)))
    (schedule,) = [Schedule.of([tensor.move()], 0)]
    messages = schedule.packed(0, 1, Large(1000, 1000))
    assert [(d.peer, d.tag, d.item.first, d.item.last) for d in messages.direct] == [
        (1, 0, 0, 245),
        (1, 1, 245, 490),
        (1, 2, 490, 700),
    ]
    assert not messages.loads and not messages.sizes and messages.size == 2800


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


@pytest.mark.parametrize("seed", range(30 * TIMES))
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


def test_what_one_tensor_leaves_idle_another_uses():
    """Ranks 2 and 3 have some of the first tensor in place, so they send more of the second one."""
    here, there = (0, 1, 2, 3), (2, 3, 4, 5, 6, 7)
    one = Tensor((48,), 4, End(here, (4,), (("S", 0),)), End(there, (6,), (("R",),)))
    other = Tensor((48,), 4, End(here, (4,), (("R",),)), End((4, 5), (2,), (("R",),)))
    moves = [one.move(), other.move()]
    sent = [Schedule.of(moves, rank).sent for rank in here]
    alone = [Schedule.of(moves[:1], rank).sent for rank in here]
    assert alone == [288, 288, 240, 240] and sent == [360] * 4


def test_a_large_part_is_cut_between_rows():
    tensor = Tensor((300, 7), 4, End((0, 1, 2), (3,), (("R",),)), End((3, 4), (2,), (("R",),)))
    schedule = Schedule.of([tensor.move()], 4)
    boxes = [load.box for load in schedule.landed(0, 1).loads]
    assert [box.length for box in boxes] == [(100, 7), (200, 7)]


def test_parts_of_one_block_are_one_load():
    """Of a tensor that comes from many ranks, what lies alike in their messages is one block; tensors that move alike
    are one item of a stream."""
    rows = End(range(6), (6,), (("S", 0),))
    tensor = Tensor((24, 8), 4, rows, End((6, 7), (2,), (("S", 1),)))
    odd = Tensor((25, 8), 4, rows, End((6, 7), (2,), (("S", 1),)))
    schedule = Schedule.of([tensor.move(), odd.move(), tensor.move()], 6)
    assert [item.tensors for item in schedule.receives[0].items] == [(0, 2), (1,)]
    assert schedule.landed(0, 1).loads[0] == Load((0, 2), Box((0, 0), (24, 4)), 0, step=64, parts=6, dim=0, apart=208)
    sent = Schedule.of([tensor.move()], 0).packed(0, 1).loads
    assert sent == [Load((0,), Box((0, 0), (4, 8)), 0, step=64, parts=2, dim=1, apart=64)]


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


@pytest.mark.parametrize("sources", [64, 512])
def test_objects_of_a_plan_grow_with_different_tensors(sources):
    """200 tensors of eight shapes, from many ranks: a piece for each shape and rank, whatever their number, and one
    block for each shape where messages are alike."""
    ends = End(range(sources), (sources,), (("S", 0),)), End(range(sources, sources + 8), (8,), (("S", 1),))
    moves = [Tensor((sources * (1 + number % 8), 64), 2, *ends).move() for number in range(200)]
    schedule = Schedule.of(moves, sources)
    assert sum([len(stream.items) for stream in schedule.receives.values()]) == 8 * sources
    assert len(schedule.landed(0, 1).loads) == 8
    assert sum([len(stream.items) for stream in Schedule.of(moves, 0).sends.values()]) == 8 * 8


@pytest.mark.parametrize("ranks, targets", [(64, 16), (256, 64), (1024, 256)])
def test_a_plan_costs_what_the_rank_sends_and_gets(ranks, targets, monkeypatch):
    """1,000 tensors from FSDP x TP x PP to EP x TP: no rank looks at the boxes of ranks that it doesn't deal with."""
    moves = model(ranks, targets, ranks)
    for rank in (5, ranks + 5):
        looked, pieces = boxes_looked_at(moves, rank, monkeypatch)
        assert 0 < looked <= pieces + 3 * 1000


def test_balance_asks_nothing_where_all_is_even(monkeypatch):
    assert balance(model(64, 16, 64)) == {}
    assert balance(model(64, 16, 0)) != {}  # some ranks have something in place
    assert balance(model(64, 16, 64, odd=2)) != {}  # uneven shards


def test_too_small_a_budget_says_what_would_do():
    tensor = Tensor((64,), 4, End(tuple(range(4)), (4,), (("S", 0),)), End(tuple(range(4, 8)), (4,), (("R",),)))
    schedule = Schedule.of([tensor.move()], 5)
    with pytest.raises(
        ValueError, match=r"budget of 200 bytes is too small: a rank has messages to 0 ranks and from 4. Give"
    ):
        schedule.least(200)
    assert schedule.least(1024) == 1


@pytest.mark.parametrize("lengths", [(), (5,), (3, 4), (2, 3, 2), (1, 1, 4)])
def test_blocks_are_the_elements_in_order(lengths):
    box = Box(tuple(range(len(lengths))), lengths)
    whole = list(itertools.product(*[range(s, s + n) for s, n in zip(*box)]))
    for first, last in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        found = [itertools.product(*[range(s, s + n) for s, n in zip(*block)]) for block in blocks(box, first, last)]
        assert list(itertools.chain(*found)) == whole[first:last]


@pytest.mark.parametrize("loads, more", [([3], 5), ([0, 0, 0], 7), ([9, 1, 4], 2), ([9, 1, 4], 50), ([2, 2], 0)])
def test_the_least_loaded_are_filled_up(loads, more):
    found = filled(loads, more)
    assert sum(found) == more and min(found) >= 0
    ends = [load + extra for load, extra in zip(loads, found)]
    assert all(end <= max(loads) or end - min(ends) <= 1 for end in ends)
    assert all(ends[i] - min(ends) <= 1 for i, extra in enumerate(found) if extra)


def test_ranks_that_stand_twice_are_refused():
    with pytest.raises(ValueError, match="twice"):
        Ranks.of((0, 1, 1, 2), (2, 2))
