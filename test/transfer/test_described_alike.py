"""Tensors that all ranks describe alike are compared and planned once, with the results of one after the other."""

import json
import random
import zlib
from unittest import mock

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from rank_pieces import any_box, cut
from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.transfers import comparison
from torch_overlay.transfers._planner.schedule import Schedule
from torch_overlay.transfers.comparison import Sides
from torch_overlay.transfers.descriptions import Description, all_from_data, as_data
from torch_overlay.transfers.options import Options
from torch_overlay.transfers.sharding import Sharding, regions_on, replicated_sharding
from torch_overlay.transfers.tensor_moves import moves_of, own_moves
from width import NIGHTLY

RANKS = 6


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
    given = [Box(*each) for each in cut(rng, shape, rng.randint(0, 5))] if is_source and rng.random() < 0.95 else []
    given += [Box(*any_box(rng, shape)) for _ in range(rng.randint(0 if given else 1, 3))]
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
    """What each rank says, and which ranks are gone."""
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
    descriptions = {
        rank: Description(source, target, options=Options(1 << 20))
        for rank, (source, target) in said.items()
        if rank not in gone
    }
    return descriptions, gone


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


class Found(Exception):
    """What is wrong with some tensors."""


def find(problems, *_, **more):
    if problems:
        raise Found(*problems)


def joined(descriptions, gone):
    """The sides of some descriptions, and what is wrong with them."""
    with mock.patch.object(comparison, "raise_if_any", find):
        try:
            return Sides.of(descriptions, gone), []
        except Found as error:
            return None, [*error.args]


def only(description, name):
    sides = [{name: side[name]} if name in side else {} for side in description[:2]]
    return description._replace(source=sides[0], target=sides[1])


# Two thousand at night.
@pytest.mark.parametrize("first", range(0, 2000, 100) if NIGHTLY else range(0, 300, 100))
def test_all_at_once_are_as_one_by_one(first):
    errors = 0
    for seed in range(first, first + 100):
        descriptions, gone = draw(seed)
        said = heard(descriptions)
        sides, problems = joined(said, gone)
        one_by_one, singly = [{}, {}, {}], []
        for name in sorted({name for each in said.values() for side in each[:2] for name in side}):
            own, own_problems = joined({rank: only(each, name) for rank, each in said.items()}, gone)
            singly += own_problems
            for merged, part in zip(one_by_one, own or ()):
                merged |= part
        assert sorted(problems) == sorted(singly), seed
        if problems:
            errors += 1
            continue
        assert [*sides] == one_by_one, seed
        with mock.patch.object(comparison, "differences", lambda *given: []):  # which a test of its own holds
            tensors, _ = sides.tensors(strict=False) if sides.source.keys() & sides.target.keys() else ([], None)
        tensors = [each for each in tensors if each.source.regions.shape == each.target.regions.shape]
        try:
            moves = moves_of(tensors, gone, {})
        except ValueError:  # pieces that leave something out
            continue
        alone = [move for each in tensors for move in moves_of([each], gone, {})]
        assert [move[:2] for move in moves] == [move[:2] for move in alone], seed
        for rank in descriptions:
            some = [moves[index] for index in own_moves(moves, rank)]
            plans = [
                in_names(Schedule.of([move.move for move in given], rank, gone), given)
                for given in (moves, alone, some)
            ]
            assert plans[0] == plans[1] == plans[2], seed
    assert 10 < errors < 90


def experts(ranks, tensors):
    """Half of the ranks have rows of each tensor, and each is whole on one of the others."""
    rows, names = ranks // 2, [f"model.layers.{n // 64}.mlp.experts.{n % 64}.weight" for n in range(tensors)]
    shape = 4 * rows, 6
    whole = replicated_sharding("bfloat16", shape, (), "cpu")
    said = {}
    for rank in range(ranks):
        box = Box((4 * rank, 0), (4, 6)) if rank < rows else Box((0, 0), shape)
        held = [name for number, name in enumerate(names) if rank < rows or number % rows == rank - rows]
        lies = dict.fromkeys(held, whole._replace(pieces=((box,),)))
        said[rank] = Description(*((lies, {}) if rank < rows else ({}, lies)), options=Options(1 << 20))
    return said


def test_what_it_takes_grows_with_what_differs():
    """A model of twenty times as many experts has as many different descriptions. What a rank hears of 64,000 pieces is
    a quarter of a megabyte."""
    counts = []
    for tensors in (96, 1920):
        said = heard(experts(64, tensors))
        with mock.patch.object(comparison, "_join", wraps=comparison._join) as join:
            sides = Sides.of(said)
        counts.append(join.call_count)
        assert len(sides.source) == len(sides.target) == tensors
    assert counts[0] == counts[1] == 1 + 32
    data = [zlib.compress(json.dumps(as_data(each)).encode()) for each in experts(64, 1920).values()]
    assert sum(map(len, data)) < 1 << 18


def test_an_error_says_on_which_devices_ranks_have_a_tensor():
    """Nothing else may differ between them."""
    said = {
        rank: Description({}, {"w": replicated_sharding("float32", (4,), (), device)})
        for rank, device in enumerate(("cpu", "cpu", "cuda"))
    }
    with pytest.raises(ValueError, match=r"a plain tensor, on cpu on ranks 0, 1, and .*, on cuda on rank 2\."):
        Sides.of(said)
