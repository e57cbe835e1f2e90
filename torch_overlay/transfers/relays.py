"""How each tensor of a relay is passed on (`_planner/relay.py`), and in which rounds. Start at `relays_of`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..distributed.tensor._planner.boxes import Box
from ._planner.boxes import stripes
from ._planner.piece_moves import End, Listed, OnMesh, clipped
from ._planner.relay import Relay, RelayTurns
from ._planner.sides import Ranks, Side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .descriptions import Tensor
    from .sharding import Sharding

# Bytes of a round, and the most rounds. With n rounds the last one ends 1 / n of the time after the first hop does.
# Between hosts a part of a run costs some milliseconds beside its bytes.
ROUND, MOST_ROUNDS = 8 << 20, 16


@lru_cache(maxsize=256)  # the experts of a layer share one sharding, and so one end, whose cells are cut once
def end_of(sharding: Sharding, slab: Box | None = None) -> End:
    """Return which rank has which boxes of a tensor with this sharding, or of a slab of such a tensor, in the form that
    the planner takes."""
    if slab is not None:
        return clipped(end_of(sharding), sharding.ranks, slab)
    if sharding.pieces:
        return Listed([(rank, enumerate(boxes)) for rank, boxes in zip(sharding.ranks, sharding.pieces)])
    return OnMesh(Side(sharding.regions, Ranks.of(sharding.ranks, sharding.regions.sizes)))


class Passing(NamedTuple):
    """How a tensor, or a slab of one, is moved in a relay.

    Attributes:
        round: in which its first hop runs.
        slab: the box of the tensor that is moved; None for all of it.
        relay: None if no two ranks want the same of it.
    """

    round: int
    slab: Box | None
    relay: Relay | None


NO_RELAY = (Passing(0, None, None),)  # of a tensor that goes straight from source to target


def relays_of(
    tensors: Sequence[Tensor], hosts: Mapping[int, str], has_rounds: bool = True, begin: int = 0
) -> dict[str, list[Passing]]:
    """Plan the relay of each tensor; the same on every rank. Tensors longer than a round are cut into slabs.

    Args:
        begin: the number of the first round.
    """
    is_within = len({*hosts.values()}) in (1, len(hosts))  # all ranks share one host, or none
    whole = [_bytes(tensor) for tensor in tensors]
    total = sum(whole)
    rounds = min(max(total // ROUND, 1), MOST_ROUNDS) if has_rounds else 1
    turns, relays, at = RelayTurns(), dict[str, list[Passing]](), 0
    for tensor, size in zip(tensors, whole):
        itemsize = tensor.wire.itemsize
        box = Box((0,) * len(tensor.target.regions.shape), tuple(tensor.target.regions.shape))
        is_wanted_twice = end_of(tensor.target).most_replicated()[0] > 1
        slabs = stripes(box, -(-size * rounds // total)) if is_wanted_twice and rounds > 1 and size else [box]
        for slab in slabs:
            part = None if len(slabs) == 1 else slab
            turn = turns.next(end_of(tensor.target, part), itemsize)
            number = at * rounds // total if at < total else rounds - 1
            at += slab.elements * itemsize
            relay = None
            if turn is not None:
                host_names = () if is_within else tuple([hosts.get(rank, "gone") for rank in tensor.target.ranks])
                relay = _relay(tensor.source, tensor.target, itemsize, turn, host_names, part)
            relays.setdefault(tensor.name, []).append(Passing(begin + number, part, relay))
    return relays


def passings_by_turn(
    tensors: Sequence[Tensor], levels: Mapping[str, int], hosts: Mapping[int, str] | None
) -> dict[str, list[Passing]]:
    """Plan tensors that come in turns (`stages.levels_of`), each turn in rounds after those of the turns before.

    Args:
        hosts: as of `relays_of`; None if nothing is passed on.
    """
    passings, begin = dict[str, list[Passing]](), 0
    for level in sorted({levels.get(tensor.name, 0) for tensor in tensors}):
        some = [tensor for tensor in tensors if levels.get(tensor.name, 0) == level]
        if hosts is None:
            passings |= {tensor.name: [Passing(begin, None, None)] for tensor in some}
        else:
            passings |= relays_of(some, hosts, begin=begin)
        begin = 1 + max(each.round for tensor in some for each in passings[tensor.name])
    return passings


def _bytes(tensor: Tensor) -> int:
    """The bytes of a whole tensor as it travels."""
    return Box((), tuple(tensor.target.regions.shape)).elements * tensor.wire.itemsize


# Cached by value: tensors with equal shardings and an equal turn are planned once.
@lru_cache(maxsize=256)
def _relay(
    source: Sharding,
    target: Sharding,
    itemsize: int,
    turn: int,
    host_names: tuple[str, ...],
    slab: Box | None,
) -> Relay:
    """Plan the relay of tensors with these shardings, whose target's ranks are on these hosts."""
    ends, hosts = (end_of(source, slab), end_of(target, slab)), dict(zip(target.ranks, host_names))
    return Relay.of(tuple(source.regions.shape), ends, target.ranks, itemsize, turn, hosts, end_of(target))
