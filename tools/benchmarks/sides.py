"""The two sides of every comparison, torch as released and torch under the overlay, and the loop that measures them.

This file imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch_overlay

Figures = TypeVar("Figures")

STOCK, OVERLAY = "stock", "overlay"
SIDES = (STOCK, OVERLAY)
_REDISTRIBUTION = "torch.distributed.tensor"


def in_turns(
    measure: Callable[[str], Figures], rounds: int, ways: Iterable[str] = SIDES, warm_up: bool = True
) -> dict[str, list[Figures]]:
    """Measure several ways, usually the two sides, in turns, and return the figures of each way.

    A round goes through the ways and back (stock, overlay, overlay, stock), so a machine that gets slower or faster
    is as bad for each of them. All ranks must call this with the same ways.

    Args:
        measure: takes one turn, on the way that it is given.
        warm_up: let each way have one turn before the rounds. That turn imports, plans and compiles, so its figures
            are dropped.
    """
    ways = tuple(ways)
    if warm_up:
        for way in ways:
            measure(way)
    figures: dict[str, list[Figures]] = {way: [] for way in ways}
    for way in (*ways, *reversed(ways)) * rounds:
        figures[way].append(measure(way))
    return figures


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
