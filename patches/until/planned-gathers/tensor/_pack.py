"""Before what arrives may be padded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def assembled(
    flat: torch.Tensor, pieces: Pieces, shape: Sequence[int], kept: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor of this shape from blocks that lie at these offsets of a flat one; the one without is `kept`. It is a
    view of the flat one where the blocks lie in place there. What lies behind them isn't read."""
    if not pieces:
        return nothing_of(flat, shape)
    dim = _row(pieces, shape)
    if dim is not None and _in_place(pieces, dim, shape):
        return flat.narrow(0, 0, math.prod(shape)).view(shape)
    views = [view_of(flat, at, box, kept) for at, box in pieces]
    if dim is None:
        whole = flat.new_empty(shape)
        for view, (_, box) in zip(views, pieces, strict=True):
            part(whole, box).copy_(view)
        return whole
    return torch.cat(views, dim).contiguous() if len(views) > 1 else views[0].clone()
