"""The two sides of every comparison: torch as released, and torch under the overlay. Imports no torch by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch_overlay

STOCK, OVERLAY = "stock", "overlay"
SIDES = (STOCK, OVERLAY)
# Each side once before and once after the other, so that a machine that gets slower or faster is fair to both.
TURNS = (STOCK, OVERLAY, OVERLAY, STOCK)


def in_turns(rounds: int, warm: bool = True) -> Iterator[tuple[int, str]]:
    """(turn, side) of so many rounds of `TURNS`. Turn 0, on the overlay, only warms up both the process and the
    overlay, so nothing of it counts."""
    if warm:
        yield 0, OVERLAY
    yield from enumerate(TURNS * rounds, start=1)


_REDISTRIBUTION = "torch.distributed.tensor"


@contextlib.contextmanager
def on(side: str, **options: str) -> Iterator[None]:
    """Run the block on this side, under the overlay with these options.

    Raises:
        RuntimeError: the overlay is on already, so stock would not be stock.
    """
    if torch_overlay.is_enabled():
        raise RuntimeError(f"the overlay is on already: what is measured as {side!r} would be something else")
    if side == STOCK:
        yield
        return
    with torch_overlay.enabled(**options):
        yield


def redistribution_patched() -> bool:
    """Whether the overlay, when on, replaces anything of DTensor's; call it with torch.distributed.tensor imported."""
    with on(OVERLAY):
        return any(row.state == "on" and row.target.startswith(_REDISTRIBUTION) for row in torch_overlay.status().rows)


NOT_PATCHED = "redistribution isn't patched by this overlay: both sides run torch's own, and the ratio shows the noise"
