"""Before a rank's own part stays where it is."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from ._pack import Local, assembled, may_change, nothing_of, part, view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._joint_groups import Group
    from ._planner.boxes import Box
    from ._planner.steps import AllToAll, Piece

Landing = tuple[int, "Box", bool]  # where a piece begins in what arrived; its box; whether it is added


def landing(
    step: AllToAll, receives: Sequence[Piece], receive_splits: Sequence[int], group: Group, shape: Sequence[int]
) -> Local:
    """From what arrived to the local tensor."""
    pieces = offsets(receives, receive_splits, group)
    op = step.op
    if op is None:
        blocks = [(at, box) for at, box, _ in pieces]
        return lambda flat: assembled(flat, blocks, shape)
    return lambda flat: _reduced(flat, pieces, shape, op)


def offsets(receives: Sequence[Piece], receive_splits: Sequence[int], group: Group) -> list[Landing]:
    """Where each piece lies in what arrived."""
    starts = [0, *itertools.accumulate(receive_splits)]
    return [(starts[group.places[piece.member]], piece.box, piece.add) for piece in receives]


def _reduced(flat: torch.Tensor, pieces: Sequence[Landing], shape: Sequence[int], op: str) -> torch.Tensor:
    if not pieces:
        return nothing_of(flat, shape)
    whole = flat.new_empty(shape)
    combine(whole, flat, pieces, op)
    return whole


def combine(whole: torch.Tensor, flat: torch.Tensor, pieces: Sequence[Landing], op: str) -> None:
    """Every term into its box of a contiguous tensor; all ranks add in the same order."""
    reduce = _REDUCE[op]
    out = may_change(flat)
    for at, box, add in pieces:
        target = part(whole, box)
        term = view_of(flat, at, box)
        if add and out:
            reduce(target, term, out=target)
        else:
            target.copy_(reduce(target, term) if add else term)
