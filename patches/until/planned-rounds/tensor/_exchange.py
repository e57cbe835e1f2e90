"""Before a round may bring a rank nothing but what it had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._pack import may_change, part, view_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def combine(
    whole: torch.Tensor, flat: torch.Tensor, pieces: Sequence[Landing], op: str | None, kept: torch.Tensor | None
) -> None:
    """Every term into its box of a contiguous tensor; all ranks add in the same order."""
    reduce = _REDUCE[op or "sum"]
    out = may_change(flat) and (kept is None or may_change(kept))
    for at, box, add in pieces:
        target = part(whole, box)
        term = view_of(flat, at, box, kept)
        if add and out:
            reduce(target, term, out=target)
        else:
            target.copy_(reduce(target, term) if add else term)
