"""Run a large exchange in rounds: one part of each piece is packed, sent and put in its place before the next one.

The result is made first, and each part goes straight where it belongs. Of an all-to-all, what a rank keeps for itself
isn't sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._torch_groups import never_nothing
from ._exchange import (
    combine,
    offsets,
    pack_pieces,
    splits,
    swap,
)
from ._pack import Local, Place, joined, part
from ._planner.plan import parts
from ._planner.regions import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._joint_groups import Group
    from ._planner.steps import AllToAll, Piece, ReduceScatter

_functional = torch.ops._c10d_functional


class _Round(NamedTuple):
    """What one round does.

    Attributes:
        exchange: from the local tensor, and the result so far, to what arrived.
        land: into the result, what arrived and what stays of the local tensor.
    """

    exchange: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    land: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def all_to_all_in_rounds(step: AllToAll, place: Place, group: Group) -> Local:
    """The whole of an all-to-all."""
    own = step.member(place.coordinate)
    sends = _in_parts(step.sends(place.coordinate), step.rounds)
    receives = _in_parts(step.receives(place.coordinate), step.rounds)
    rounds = [_one_round(step, *pieces, own, group) for pieces in zip(sends, receives, strict=True)]

    def run(local: torch.Tensor) -> torch.Tensor:
        whole = local.new_empty(place.wanted.length)
        for exchange, land in rounds:
            land(whole, exchange(local, whole), local)
        return whole

    return run


def _in_parts(pieces: Sequence[Piece], rounds: int) -> list[list[Piece]]:
    """What each round moves of these pieces, in their order; pieces without elements are left out."""
    found: list[list[Piece]] = [[] for _ in range(rounds)]
    for piece in pieces:
        for number, box in enumerate(parts(piece.box.length, rounds)):
            if 0 not in box.length:
                found[number].append(piece._replace(box=_placed(box, piece.box)))
    return found


def _placed(box: Box, outer: Box) -> Box:
    """A box that was counted from the first element of another, counted as that one is."""
    return Box(tuple([start + at for start, at in zip(outer.start, box.start, strict=True)]), box.length)


def _one_round(step: AllToAll, sends: Sequence[Piece], receives: Sequence[Piece], own: int, group: Group) -> _Round:
    sent, received = ([piece for piece in pieces if piece.member != own] for pieces in (sends, receives))
    kept = next((piece.box for piece in sends if piece.member == own), None)
    outgoing, incoming = splits(sent, group), splits(received, group)
    pack = never_nothing(pack_pieces(sent, group), outgoing, incoming, group, group.places[own])
    send = swap(outgoing, incoming, group, _functional.wait_tensor)
    landing = offsets(receives, incoming, group, own)

    def exchange(local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return send(pack(local, whole))

    def land(whole: torch.Tensor, came: torch.Tensor, local: torch.Tensor) -> None:
        combine(whole, came, landing, step.op, None if kept is None else part(local, kept))

    return _Round(exchange, land)


def reduce_scatter_in_rounds(step: ReduceScatter, place: Place, group: Group) -> Local:
    """The whole of a reduce-scatter whose pieces are all alike."""
    pieces = sorted(step.pieces(place.coordinate), key=lambda piece: group.places[piece.member])
    rounds = parts(place.wanted.length, step.rounds)
    op, size, name = step.op, step.ranks, group.name

    def reduced(pieces: list[torch.Tensor]) -> torch.Tensor:
        return _functional.wait_tensor(_functional.reduce_scatter_tensor(joined(pieces), op, size, name))

    def run(local: torch.Tensor) -> torch.Tensor:
        whole = local.new_empty(place.wanted.length)
        for some in rounds:
            target = part(whole, some)
            target.copy_(reduced([part(local, _placed(some, piece.box)) for piece in pieces]).view(target.shape))
        return whole

    return run
