"""Ranks that ask planners, in one process: each has the plan, and all have the error, of ranks that know all pieces."""

import json
import random

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.transfers._planner.schedule import Schedule
from torch_overlay.transfers.comparison import agreed, check_ranks
from torch_overlay.transfers.descriptions import Description, all_from_data, as_data
from torch_overlay.transfers.options import Options
from torch_overlay.transfers.planner_ranks import (
    Answers,
    Planner,
    Verdict,
    agreed_beside,
    in_pieces,
    is_among,
    key_of,
    names_of_others,
    statements,
    without_pieces,
)
from torch_overlay.transfers.sharding import Sharding, regions_on, replicated_sharding
from torch_overlay.transfers.tensor_moves import check_nothing_is_lost, moves_from_planners, moves_of
from width import NIGHTLY

RANKS = 6


def cut(rng, shape, many):
    """The whole as boxes, cut at random."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(many if shape else 0):
        start, length = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        at = rng.randint(0, length[dim])
        for low, high in ((0, at), (at, length[dim])):
            boxes.append(
                Box(
                    (*start[:dim], start[dim] + low, *start[dim + 1 :]), (*length[:dim], high - low, *length[dim + 1 :])
                )
            )
    return boxes


def any_box(rng, shape):
    ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def draw_side(rng, shape, dtype, is_source):
    """By rank, how it has a tensor: on a mesh, plain or in pieces."""
    kind = rng.choice(("mesh", "plain", "pieces", "pieces", "pieces"))
    ranks = rng.sample(range(RANKS), rng.randint(1, RANKS))
    if kind == "mesh":
        sizes = rng.choice([(len(ranks),), (1, len(ranks))] + ([(2, len(ranks) // 2)] if len(ranks) % 2 == 0 else []))
        which = [Replicate(), *map(Shard, range(len(shape)))] + (
            [] if is_source or rng.random() < 0.95 else [Partial()]
        )
        regions = regions_on(tuple(rng.choice(which) for _ in sizes), None, shape, sizes)
        return dict.fromkeys(ranks, Sharding(dtype, regions, tuple(ranks), "cpu"))
    if kind == "plain":
        return dict.fromkeys(ranks, replicated_sharding(dtype, shape, (), "cpu"))
    given = cut(rng, shape, rng.randint(0, 5)) if is_source and rng.random() < 0.95 else []
    given += [any_box(rng, shape) for _ in range(rng.randint(0 if given else 1, 3))]
    held = {}
    for box in given:
        for rank in rng.sample(ranks, rng.randint(1, min(len(ranks), 3))):
            held.setdefault(rank, []).append(box)
    return {
        rank: replicated_sharding(dtype, shape, (), "cpu")._replace(pieces=(tuple(boxes),))
        for rank, boxes in held.items()
    }


def planted(rng, said, name, side):
    """One rank of a tensor says something else of it."""
    rank = rng.choice(sorted(rank for rank, sides in said.items() if name in sides[side]))
    sharding = said[rank][side][name]
    what = rng.choice(("type", "shape", "device", "nothing", "plain"))
    if what == "type":
        sharding = sharding._replace(dtype="int64")
    elif what == "shape":
        shape = (*sharding.regions.shape, 2)
        pieces = tuple(tuple(Box((*b.start, 0), (*b.length, 2)) for b in boxes) for boxes in sharding.pieces)
        sharding = sharding._replace(
            regions=sharding.regions._replace(shape=shape, orders=(*sharding.regions.orders, ()))
        )
        sharding = sharding._replace(pieces=pieces)
    elif what == "device":
        sharding = sharding._replace(device="cuda")
    elif what == "plain":
        sharding = replicated_sharding(sharding.dtype, tuple(sharding.regions.shape), (), sharding.device)
    said[rank][side][name] = sharding
    if what == "nothing":
        del said[rank][side][name]


def draw(seed):
    """What each rank says, whether names must be on both sides, and which ranks are gone."""
    rng = random.Random(seed)
    said = {rank: ({}, {}) for rank in range(RANKS)}
    names, specs = [f"t{number}" for number in rng.sample(range(20), rng.randint(1, 7))], []
    for name in names:
        if not specs or rng.random() < 0.6:
            shape = tuple(rng.choice((0, 1, 2, 3, 4, 6)) for _ in range(rng.randint(0, 3)))
            types = [rng.choice(("float32", "float32", "bfloat16", "float64")) for _ in range(2)]
            specs.append([draw_side(rng, shape, dtype, not side) for side, dtype in enumerate(types)])
        sides = specs[-1] if rng.random() < 0.8 else rng.choice(specs)
        alone = rng.random()
        for side, held in enumerate(sides):
            if alone > 0.08 or side == (alone > 0.04):
                for rank, sharding in held.items():
                    said[rank][side][name] = sharding
    gone = frozenset(rng.sample(range(RANKS), 1)) if rng.random() < 0.2 else frozenset()
    if rng.random() < 0.3:
        for _ in range(rng.choice((1, 1, 4))):
            side = rng.randrange(2)
            if some := sorted({name for sides in said.values() for name in sides[side]}):
                planted(rng, said, rng.choice(some), side)
    odd = rng.random() < 0.2  # some replica has another value
    descriptions = {}
    for rank, (source, target) in said.items():
        digests = {}
        for name, sharding in source.items():
            if not sharding.ranks:
                shape = tuple(sharding.regions.shape)
                boxes = sharding.pieces[0] if sharding.pieces else [Box((0,) * len(shape), shape)]
                digests[name] = [
                    (box, f"{name} {rng.random() if odd and box.elements and rng.random() < 0.2 else 0}")
                    for box in boxes
                ]
        if rank not in gone:
            descriptions[rank] = Description(source, target, None, digests, options=Options(1 << 20))
    return descriptions, rng.random() < 0.5, gone


def heard(descriptions):
    """As it comes by JSON."""
    said = {rank: json.loads(json.dumps(as_data(each))) for rank, each in descriptions.items()}
    alike = {json.dumps(each): each for each in said.values()}
    return all_from_data({rank: alike[json.dumps(each)] for rank, each in said.items()})


def in_names(schedule, moves):
    """A schedule, with tensors and their pieces in place of numbers."""

    def items(streams):
        return {
            peer: [
                ([(moves[n].tensor.name, moves[n].numbers) for n in item.tensors], *item[1:]) for item in stream.items
            ]
            for peer, stream in streams.items()
        }

    kept = [((moves[number].tensor.name, moves[number].numbers), *boxes) for number, *boxes in schedule.kept]
    return items(schedule.sends), items(schedule.receives), kept


def listed(descriptions, strict, gone):
    """What each rank does if all know all pieces."""
    said = heard(descriptions)
    tensors, left_out = agreed(said, gone, strict)
    moves = moves_of(tensors, gone, {})
    check_nothing_is_lost(moves, gone, None)
    ways = [each.move for each in moves]
    ends = [{rank for tensor in tensors for rank in getattr(tensor, side).ranks} for side in ("source", "target")]
    plans = {rank: in_names(Schedule.of(ways, rank, gone), moves) for rank in descriptions}
    own = {  # the pieces of each rank, and the types of both sides
        rank: [
            (each.tensor.name, each.numbers, each.tensor.wire, each.move.held(rank), each.move.wanted(rank))
            for each in moves
            if each.move.held(rank) is not None or each.move.wanted(rank) is not None
        ]
        for rank in descriptions
    }
    return plans, own, left_out, len(tensors), ends, {tensor.name for tensor in tensors}


def asked(descriptions, strict, gone):
    """The same by planners. What is wrong is found by each rank for itself, from the same verdict."""
    said = {}
    for rank, each in descriptions.items():
        plain = {name: found for name, found in each.digests.items() if not each.source[name].pieces}
        said[rank] = each._replace(unlisted=1, digests=plain)
    said = heard(said)
    check_ranks(said)
    others = without_pieces(said)
    members = [rank for rank, each in descriptions.items() if each.source or each.target]
    names = names_of_others(others)
    pieces = {rank: [in_pieces(side) for side in each[:2]] for rank, each in descriptions.items()}
    stated = {rank: statements(pieces[rank], len(members)) for rank in members}
    planners = [
        Planner({rank: stated[rank][0][n] for rank in members}, others, gone, strict) for n in range(len(members))
    ]
    told = [planner.answers(members) for planner in planners]
    answers = {
        rank: Answers([each[place] for each in told], stated[rank][1], names) for place, rank in enumerate(members)
    }
    seen = {
        rank: answers[rank].digests(lambda name, number, rank=rank: descriptions[rank].digests[name][number][1])
        for rank in members
    }
    for n, planner in enumerate(planners):
        planner.compare({rank: seen[rank][n] for rank in members})
    verdict = Verdict.of(json.loads(json.dumps([planner.verdict() for planner in planners] + [{}])), names)
    beside = agreed_beside(verdict, others, gone, strict)
    meshes = moves_of(beside.tensors, gone, {})
    plans, own = {}, {}
    for rank in descriptions:
        moves = meshes
        if rank in members:
            moves = moves_from_planners(meshes, answers[rank], pieces[rank], beside, rank)
            assert all(is_among(answers[rank].keys, each.tensor.name) or each in meshes for each in moves)
        check_nothing_is_lost(moves, gone, verdict)
        plans[rank] = in_names(Schedule.of([each.move for each in moves], rank, gone), moves)
        own[rank] = [
            (each.tensor.name, each.numbers, each.tensor.wire, each.move.held(rank), each.move.wanted(rank))
            for each in moves
            if each.move.held(rank) is not None or each.move.wanted(rank) is not None
        ]
    known = {tensor.name for tensor in beside.tensors}
    ends = [
        {rank for tensor in beside.tensors for rank in getattr(tensor, side).ranks} | verdict.ranks[number]
        for number, side in enumerate(("source", "target"))
    ]
    every = {name for each in descriptions.values() for side in each[:2] for name in side}
    keys = next(iter(answers.values())).keys if answers else []
    moved = known | {name for name in every if key_of(name) in keys}
    return plans, own, beside.left_out, len(beside.tensors) + verdict.tensors, ends, moved


def outcome(way, case):
    try:
        return way(*case)
    except ValueError as error:
        return str(error)


# Two thousand at night.
@pytest.mark.parametrize("first", range(0, 2000, 100) if NIGHTLY else range(0, 300, 100))
def test_plans_and_errors_are_those_of_ranks_that_know_all_pieces(first):
    errors = 0
    for seed in range(first, first + 100):
        case = draw(seed)
        one, other = outcome(listed, case), outcome(asked, case)
        assert one == other, seed
        errors += isinstance(one, str)
    assert 10 < errors < 90


def heard_bytes(ranks, tensors):
    """What a trainer hears, as a planner and from planners, where half of the ranks have rows of each tensor, and each
    is whole on one of the others."""
    rows, names = ranks // 2, [f"expert {number}" for number in range(tensors)]
    shape = 4 * rows, 6
    whole = replicated_sharding("bfloat16", shape, (), "cpu")
    sides = []
    for rank in range(ranks):
        box = Box((4 * rank, 0), (4, 6)) if rank < rows else Box((0, 0), shape)
        held = [name for number, name in enumerate(names) if rank < rows or number % rows == rank - rows]
        lies = dict.fromkeys(held, whole._replace(pieces=((box,),)))
        sides.append([lies, {}] if rank < rows else [{}, lies])
    stated = [statements(each, ranks) for each in sides]
    others = {rank: Description({}, {}) for rank in range(ranks)}
    told = [Planner({r: messages[n] for r, (messages, _) in enumerate(stated)}, others) for n in range(ranks)]
    answers = [planner.answers(range(ranks)) for planner in told]
    found = Answers([each[1] for each in answers], stated[1][1], [])
    assert len([*found.moves(sides[1], [{}, {}], 1)]) == tensors
    return sum(len(messages[1]) for messages, _ in stated) + sum(len(each[1]) for each in answers)


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_rank_hears_of_its_own_pieces_and_of_its_share(ranks):
    """It has 2,000 pieces, as each trainer; all ranks have 66,000 where they are 64."""
    share = 2000 * (ranks // 2 + 1) / ranks
    assert heard_bytes(ranks, 2000) < 150 * (2000 + share)
