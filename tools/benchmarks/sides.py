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


def in_turns(
    measure: Callable[[str], Figures], rounds: int, ways: Iterable[str] = SIDES, warm_up: bool = True
) -> dict[str, list[Figures]]:
    """Measure several ways, usually the two sides, in turns there and back (stock, overlay, overlay, stock), so a
    machine that gets slower is as bad for each. All ranks must call this. The turns of `warm_up` are dropped."""
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
    if torch_overlay.is_enabled():
        raise RuntimeError(f"the overlay is on already: what is measured as {side!r} would be something else")
    if side == STOCK:
        yield
        return
    with torch_overlay.enabled(**options):
        yield
