"""Balance: how much each replica sends, over all tensors of a transfer, so that the busiest rank sends least.

Tensors that are cut by the same axes of one mesh have the same replicas. They are a class, and what a cell of a class
has to send can be shared among its replicas in any proportion. `balance` finds the proportions: each cell in turn fills
up those of its replicas that send least, until they are level. That is descent on the sum of squares, one block of
variables after the other; and the loads with the least sum of squares have the least maximum as well, since the loads
that are possible are the base of a polymatroid. A few rounds do.

Where no rank has anything in place and all cuts are even, equal shares are best and nothing has to be computed. That is
so for most transfers from one set of ranks to another. Else the time grows with the ranks of the source and with the
number of different moves. Every rank computes the same, in whole numbers. Standard library only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .lines import Line

if TYPE_CHECKING:
    from .routes import Move
    from .sides import Coordinate, Ranks, Side

ROUNDS = 16
ENOUGH = 200  # stop when a round takes less than one part in so many from the busiest rank


class Class(NamedTuple):
    """Tensors that have the same replicas."""

    ranks: Ranks
    cut: frozenset[int]

    @staticmethod
    def of(source: Side) -> Class:
        """The class of a tensor by its source."""
        return Class(source.ranks, source.regions.sharded)


Weights = Mapping[tuple[Class, "Coordinate"], Sequence[int]]


def balance(moves: Iterable[Move], gone: frozenset[int] = frozenset()) -> Weights:
    """By class and cell, the bytes that each replica should send; what isn't in it is shared evenly. Ranks that are
    gone send nothing."""
    counted = Counter(moves)
    if not gone and (_is_even(counted) or all(move.source.replicas == 1 for move in counted)):
        return {}
    loads: dict[int, int] = {}
    flexible: dict[tuple[Class, Coordinate], _Share] = {}
    for move, times in counted.items():
        kind = Class.of(move.source)
        for cell in move.source.cells():
            wanted = times * move.itemsize * Line.of(move, cell).total
            share = flexible.get((kind, cell))
            if share is None:
                ranks = [rank for rank in move.source.holders(cell) if rank not in gone]
                share = flexible[kind, cell] = _Share(ranks, [0] * len(ranks))
            share.add_evenly(wanted)
    for share in flexible.values():
        for rank, load in zip(share.ranks, share.loads):
            loads[rank] = loads.get(rank, 0) + load
    flexible = {key: share for key, share in flexible.items() if (gone or len(share.ranks) > 1) and any(share.loads)}
    _level(loads, list(flexible.values()))
    if not gone:
        return {key: tuple(share.loads) for key, share in flexible.items()}
    every = {
        (Class.of(move.source), cell): move.source.holders(cell) for move in counted for cell in move.source.cells()
    }
    sent = {key: dict(zip(share.ranks, share.loads)) for key, share in flexible.items()}
    return {key: tuple([of.get(rank, 0) for rank in every[key]]) for key, of in sent.items()}


class _Share(NamedTuple):
    """What the replicas of one cell send of one class, in bytes."""

    ranks: list[int]
    loads: list[int]

    def add_evenly(self, wanted: int) -> None:
        many, given = len(self.ranks), 0
        for number in range(many):
            upto = wanted * (number + 1) // many
            self.loads[number] += upto - given
            given = upto

    def level(self, loads: dict[int, int]) -> None:
        """Share anew, given what the ranks send of everything."""
        others = [loads[rank] - load for rank, load in zip(self.ranks, self.loads)]
        self.loads[:] = filled(others, sum(self.loads))
        for rank, other, load in zip(self.ranks, others, self.loads):
            loads[rank] = other + load


def _level(loads: dict[int, int], shares: list[_Share]) -> None:
    shares.sort(key=lambda share: len(share.ranks))  # those with little choice first
    for _ in range(ROUNDS):
        busiest = max(loads.values(), default=0)
        if busiest * len(loads) == sum(loads.values()):
            return
        for share in shares:
            share.level(loads)
        if (busiest - max(loads.values(), default=0)) * ENOUGH < busiest:
            return


def filled(loads: Sequence[int], more: int) -> list[int]:
    """What each gets of `more` if the least loaded are filled up until they are level.

    >>> filled([5, 0, 2], 6)  # up to a level of 4
    [0, 4, 2]
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    below, many = 0, 0
    for many, number in enumerate(order, 1):
        below += loads[number]
        if many == len(order) or (below + more) // many <= loads[order[many]]:
            break
    level, rest = divmod(below + more, many)
    found = [0] * len(loads)
    for place, number in enumerate(order[:many]):
        found[number] = level + (place < rest) - loads[number]
    return found


def _is_even(moves: Iterable[Move]) -> bool:
    """Whether equal shares are best because all ranks of a mesh have the same to send, and no rank is in two meshes
    with some of its ranks only."""
    meshes: list[Ranks] = []
    for move in moves:
        source = move.source
        if source.ranks.meets(move.target.ranks) or not _cuts_evenly(source):
            return False
        if source.ranks not in meshes:
            meshes.append(source.ranks)
    pairs = [(one, other) for number, one in enumerate(meshes) for other in meshes[:number]]
    return all(not one.meets(other) or one.same_set(other) for one, other in pairs)


def _cuts_evenly(side: Side) -> bool:
    shape, sizes, orders, _ = side.regions
    return all(length % math.prod([sizes[axis] for axis in order]) == 0 for length, order in zip(shape, orders))
