"""Counts figures again, each recipe several at once: by name, stock's value and the overlay's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

Counted = dict[str, tuple[int, int]]


def groups() -> Counted:
    """Process groups and calls of `new_group` on one rank of the fake backend, each side in a process of its own."""
    from benchmarks import groups, process

    sides: dict[str | None, Any] = {
        share: process.fresh("groups:count", side="overlay" if share else "stock", share=share, ones=8192)
        for share in (None, "names", "ranks")
    }
    found = {}
    for recipe, stock in sides[None].items():
        names, ranks = sides["names"][recipe], sides["ranks"][recipe]
        found[f"groups.{recipe}"] = stock[groups.GROUPS], names[groups.GROUPS]
        found[f"groups.{recipe}.ranks"] = stock[groups.GROUPS], ranks[groups.GROUPS]
        found[f"calls.{recipe}"] = stock[groups.CALLS], names[groups.CALLS]
    return found


def pairs() -> Counted:
    """Collectives, and elements that the busiest rank receives, of all redistributions of a 16x16 tensor on a (2, 2, 2)
    mesh of GPUs with every view flattened, from one set of placements to another: as `explain` counts both plans."""
    from benchmarks import plans
    from benchmarks.sides import SIDES

    sums: Counter[tuple[str, str]] = Counter()
    for source, target in plans.pairs():
        kind = plans.REDUCTIONS if "P" in source else plans.MOVES
        for side, (collectives, incoming) in plans.counts(source, target, (16, 16), "cuda").items():
            sums[f"{kind}.collectives", side] += collectives
            sums[f"{kind}.elements", side] += incoming // 4  # of float32
    stock, overlay = SIDES
    return {name: (sums[name, stock], sums[name, overlay]) for name, _ in sums}


def uneven() -> Counted:
    """Lengths of a vector, 1 to 16, that come back wrong from a flattened 2 x 2 mesh of gloo ranks."""
    from benchmarks import process

    found = process.ranks("uneven:wrong", 4, longest=16)
    return {"wrong.lengths": (found["stock"], found["overlay"])}


RECIPES: dict[str, Callable[[], Counted]] = {"groups": groups, "pairs": pairs, "uneven": uneven}
