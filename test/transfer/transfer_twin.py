"""The slow twin of a transfer: each tensor as a list of numbered elements, its parts cut by hand, all ranks in one
process, the exchanges carried out on plain bytes; and the least that the busiest rank must send, by maximum flows.

Of the code under test only schedules and their boxes are used, and only to do what they say.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.distributed.tensor._planner.regions import Cuts, Regions
from torch_overlay.transfers._planner.routes import Move
from torch_overlay.transfers._planner.schedule import Schedule
from torch_overlay.transfers._planner.sides import Ranks, Side
from twins_tensor import coordinates, held, rows

GRIDS = (
    (1,),
    (2,),
    (3,),
    (4,),
    (5,),
    (6,),
    (7,),
    (8,),
    (2, 2),
    (2, 3),
    (3, 2),
    (2, 4),
    (4, 2),
    (2, 2, 2),
    (1, 2, 1, 2),
)
ITEMSIZES = (1, 1, 2, 2, 4, 8, 16)


@dataclass(frozen=True)
class End:
    """A tensor's source or target: the ranks of a mesh, row-major, its sizes, and a placement for each axis."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    placements: tuple

    def held(self, shape, rank):
        """The elements that a rank has, row-major; none on a rank outside of the mesh."""
        if rank not in self.ranks:
            return []
        return held(self.placements, shape, self.sizes, self.coordinate(rank))

    def coordinate(self, rank):
        return coordinates(self.sizes)[self.ranks.index(rank)]

    def side(self, shape):
        dims = [p[1] if p[0] in ("S", "SS", "FS") else None for p in self.placements]
        factors = [p[2] if p[0] in ("SS", "FS") else 1 for p in self.placements]
        cuts = Cuts.of(dims, [None] * len(dims), len(shape), self.sizes, factors=factors)
        return Side(Regions(shape, self.sizes, cuts.orders, cuts.partial), Ranks.of(self.ranks, self.sizes))


@dataclass(frozen=True)
class Tensor:
    """One tensor of a transfer."""

    shape: tuple[int, ...]
    itemsize: int
    source: End
    target: End

    def move(self):
        return Move(self.source.side(self.shape), self.target.side(self.shape), self.itemsize)


def draw(seed, world=8, most=4, lengths=(0, 1, 2, 3, 5, 6, 8, 12), dims=3, uneven=True, lone=False):
    """Some tensors from one mesh to another, of up to so many ranks: disjoint, overlapping or equal, in any order.

    With `uneven`, strided shards need not divide evenly; with `lone`, some have any split factor.
    """
    rng = random.Random(seed)
    meshes = [_mesh(rng, world), _mesh(rng, world)]
    if rng.random() < 0.2:
        meshes[1] = meshes[0]
    found = []
    for _ in range(rng.randint(1, most)):
        shape = tuple(rng.choice(lengths) for _ in range(rng.randint(0, dims)))
        ends = [End(ranks, sizes, _placements(rng, shape, sizes, uneven, lone)) for ranks, sizes in meshes]
        found.append(Tensor(shape, rng.choice(ITEMSIZES), *ends))
    found += [rng.choice(found) for _ in range(rng.choice((0, 0, 1, 3)))]  # some move alike
    rng.shuffle(found)
    return found


def _mesh(rng, world):
    sizes = rng.choice([sizes for sizes in GRIDS if math.prod(sizes) <= world])
    ranks = rng.sample(range(world), math.prod(sizes))
    return tuple(sorted(ranks) if rng.random() < 0.5 else ranks), sizes


def _placements(rng, shape, sizes, uneven, lone):
    found = [rng.choice([("R",), *[("S", dim) for dim in range(len(shape))]]) for _ in sizes]
    if len(sizes) > 1 and rng.random() < 0.3:  # the first axis cuts within the last one's shards, as FSDP does with TP
        last = found[-1]
        if last[0] == "S" and not any(p == last for p in found[1:-1]):
            parts = sizes[0] * sizes[-1]
            if shape[last[1]] % parts == 0 or uneven:
                found[0] = ("FS", last[1], sizes[-1])
    if lone and rng.random() < 0.4:
        for axis, (kind, *rest) in enumerate(found):
            if kind == "S" and sum(p[0] != "R" and p[1] == rest[0] for p in found) == 1:
                found[axis] = ("SS", rest[0], rng.choice((2, 3, 4)))
    return tuple(found)


# --- carried out on bytes


class Local:
    """What a rank holds of a tensor: a cell for each element, row-major, with its bytes or None."""

    def __init__(self, tensor, end, rank, cells):
        self.cells, self.itemsize = cells, tensor.itemsize
        found = rows(end.placements, tensor.shape, end.sizes, end.coordinate(rank))
        self.lengths = [len(indices) for indices in found]

    def places(self, box):
        """Where the elements of a box of it lie, row-major."""
        ranges = [range(start, start + length) for start, length in zip(*box, strict=True)]
        for r, length in zip(ranges, self.lengths, strict=True):
            assert r.start >= 0 and r.stop <= length, f"{box} is not in {self.lengths}"
        strides = [math.prod(self.lengths[dim + 1 :]) for dim in range(len(ranges))]
        return [sum(i * s for i, s in zip(at, strides)) for at in itertools.product(*ranges)]

    def read(self, box):
        return b"".join([self.cells[place] for place in self.places(box)])

    def write(self, box, data):
        """AssertionError if an element comes twice."""
        for number, place in enumerate(self.places(box)):
            assert self.cells[place] is None, "an element came twice"
            self.cells[place] = bytes(data[number * self.itemsize : (number + 1) * self.itemsize])


@dataclass
class Outcome:
    """What came of a transfer.

    wrong: a rank and a tensor whose target isn't what it should be; None if all are right.
    count: of exchanges. staged: the bytes that some rank had in memory at most, in two exchanges.
    sent, received: by rank, the bytes of elements.
    """

    wrong: tuple | None
    count: int
    staged: int
    sent: list[int]
    received: list[int]


def content(tensor, number, element):
    """The bytes of an element, different ones for each element and tensor."""
    return random.Random(f"{number} {element}").randbytes(tensor.itemsize)


def carry_out(tensors, world, budget, large=None, gone=frozenset()):
    """All exchanges, with large pieces by themselves if it says which these are. AssertionError if a rank gets another
    message than it expects, or an element twice."""
    moves = [tensor.move() for tensor in tensors]
    schedules = [Schedule.of(moves, rank, gone) if rank not in gone else Schedule({}, {}, []) for rank in range(world)]
    sources = [_locals(tensors, rank, True) for rank in range(world)]
    targets = [_locals(tensors, rank, False) for rank in range(world)]
    for rank, schedule in enumerate(schedules):
        for number, old, new in schedule.kept:
            targets[rank][number].write(new, sources[rank][number].read(old))
    count = max([schedule.least(budget) for schedule in schedules])
    sizes = []
    for number in range(count):
        sizes.append(
            _exchange(
                [schedule.packed(number, count, large) for schedule in schedules],
                [schedule.landed(number, count, large) for schedule in schedules],
                sources,
                targets,
            )
        )
    wrong = next((rank_and_tensor for rank_and_tensor in _wrong(tensors, targets)), None)
    sent, received = [s.sent for s in schedules], [s.received for s in schedules]
    return Outcome(wrong, count, _staged(sizes, world), sent, received)


def _locals(tensors, rank, full):
    found = {}
    for number, tensor in enumerate(tensors):
        end = tensor.source if full else tensor.target
        if rank in end.ranks:
            cells = [content(tensor, number, e) if full else None for e in end.held(tensor.shape, rank)]
            found[number] = Local(tensor, end, rank, cells)
    return found


def _exchange(packed, landed, sources, targets):
    """One exchange on all ranks; by rank, the bytes that it sent and those that came."""
    messages = {}
    for rank, (sizes, loads, direct) in enumerate(packed):
        for peer, tag, item in direct:
            assert (rank, peer, tag) not in messages, "two messages with one tag"
            messages[rank, peer, tag] = b"".join(
                [sources[rank][item.tensors[0]].read(block) for block in _blocks(item)]
            )
        buffer = bytearray(sum(sizes.values()))
        for tensor, box, at in _apart(loads):
            data = sources[rank][tensor].read(box)
            assert at % sources[rank][tensor].itemsize == 0, "not aligned"
            buffer[at : at + len(data)] = data
        at = 0
        for peer, size in sizes.items():
            messages[rank, peer] = buffer[at : at + size]
            at += size
    for rank, (sizes, loads, direct) in enumerate(landed):
        for peer, tag, item in direct:
            data, at = messages.pop((peer, rank, tag)), 0
            for block in _blocks(item):
                size = block.elements * item.itemsize
                targets[rank][item.tensors[0]].write(block, data[at : at + size])
                at += size
        assert sizes == {peer: len(messages[peer, rank]) for peer in range(len(packed)) if (peer, rank) in messages}
        buffer = b"".join([messages[peer, rank] for peer in sizes])
        for tensor, box, at in _apart(loads):
            assert at % targets[rank][tensor].itemsize == 0, "not aligned"
            targets[rank][tensor].write(box, buffer[at : at + math.prod(box.length) * targets[rank][tensor].itemsize])
    assert all(len(key) == 2 for key in messages), "a direct message that nobody expects"
    return [(one.size, other.size) for one, other in zip(packed, landed)]


def _apart(loads):
    """Each part of the block of each tensor: the tensor, where the part lies in it, and where in the buffer."""
    for load in loads:
        for number, tensor in enumerate(load.tensors):
            for part in range(load.parts):
                start, length = map(list, load.box)
                if load.parts > 1:
                    length[load.dim] //= load.parts
                    start[load.dim] += part * length[load.dim]
                yield tensor, Box(tuple(start), tuple(length)), load.at + number * load.step + part * load.apart


def _blocks(item):
    """The elements of an item by themselves, in the order in which they travel."""
    places = [range(start, start + length) for start, length in zip(*item.box)]
    ones = (1,) * len(places)
    return [Box(at, ones) for at in list(itertools.product(*places))[item.first : item.last]]


def _staged(sizes, world):
    """While one exchange runs the next is packed; then that one runs while the first lands."""
    most = 0
    for now, after in itertools.zip_longest(sizes, sizes[1:], fillvalue=[(0, 0)] * world):
        for (out, into), (next_out, next_into) in zip(now, after):
            most = max(most, out + into + next_out, into + next_out + next_into)
    return most


def _wrong(tensors, targets):
    for rank, local in enumerate(targets):
        for number, tensor in enumerate(tensors):
            wanted = [content(tensor, number, e) for e in tensor.target.held(tensor.shape, rank)]
            if (local[number].cells if number in local else []) != wanted:
                yield rank, number


# --- the least that must be sent


def lacking(tensors, world):
    """By the ranks that hold them, the bytes that have to go to others; and by rank, the bytes that it lacks."""
    wanted, lacked = {}, [0] * world
    for tensor in tensors:
        holds, wants = ([0] * math.prod(tensor.shape) for _ in range(2))  # by element, the ranks as bits
        for end, found in ((tensor.source, holds), (tensor.target, wants)):
            for rank in end.ranks:
                for element in end.held(tensor.shape, rank):
                    found[element] |= 1 << rank
        for (have, want), elements in Counter(zip(holds, wants)).items():
            holders = frozenset(rank for rank in range(world) if have >> rank & 1)
            for rank in range(world):
                if want >> rank & 1 and rank not in holders:
                    wanted[holders] = wanted.get(holders, 0) + elements * tensor.itemsize
                    lacked[rank] += elements * tensor.itemsize
    return wanted, lacked
