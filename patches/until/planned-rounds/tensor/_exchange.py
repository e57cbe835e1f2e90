"""Before there are rounds, in which a rank may get nothing but what it had, and makes its result of two tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._pack import Local, joined, may_change, part, view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ._joint_groups import Group
    from ._planner.steps import Piece


def combine(
    whole: torch.Tensor, flat: torch.Tensor, pieces: Sequence[Landing], op: str, kept: torch.Tensor | None
) -> None:
    """Every term into its box of a contiguous tensor; all ranks add in the same order."""
    reduce = _REDUCE[op]
    out = may_change(flat)
    for at, box, add in pieces:
        target = part(whole, box)
        term = view_of(flat, at, box, kept)
        if add and out:
            reduce(target, term, out=target)
        else:
            target.copy_(reduce(target, term) if add else term)


def pack_pieces(sends: Sequence[Piece], group: Group) -> Local:
    """What goes to members from a local tensor; if nothing, see `unread`."""
    boxes = [piece.box for piece in sorted(sends, key=lambda piece: group.places[piece.member])]
    return lambda local: joined([part(local, box) for box in boxes]) if boxes else unread(local)


def unread(local: torch.Tensor) -> torch.Tensor:
    """No elements. They depend on this tensor: a compiler takes two exchanges of the same for one, and the other
    ranks, who send something, would wait for the second."""
    return local.reshape(-1).narrow(0, 0, 0)
