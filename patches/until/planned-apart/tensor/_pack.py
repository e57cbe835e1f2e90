"""Before a rank's own part stays where it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ._planner.boxes import Box

Pieces = Sequence[tuple[int, "Box"]]  # where each box begins in a flat tensor


def assembled(flat: torch.Tensor, pieces: Pieces, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of this shape from blocks that lie at these offsets of a flat one; a view of it where they lie in place
    there. What lies behind them isn't read."""
    if not pieces:
        return nothing_of(flat, shape)
    dim = _row(pieces, shape)
    if dim is not None and _in_place(pieces, dim, shape):
        return flat.narrow(0, 0, math.prod(shape)).view(shape)
    views = [view_of(flat, at, box) for at, box in pieces]
    if dim is None:
        whole = flat.new_empty(shape)
        for view, (_, box) in zip(views, pieces, strict=True):
            part(whole, box).copy_(view)
        return whole
    return torch.cat(views, dim).contiguous() if len(views) > 1 else views[0].clone()


def view_of(flat: torch.Tensor, at: int, box: Box) -> torch.Tensor:
    """The block for a box, from this offset on."""
    return flat.narrow(0, at, box.elements).view(box.length)
