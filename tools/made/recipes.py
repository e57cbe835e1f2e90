"""Counts figures again, each recipe several at once: by name, stock's value and the overlay's."""

from __future__ import annotations

import itertools
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
    found = {}
    for kind, first in (("moves", "R,S0,S1"), ("reductions", "P,R,S0,S1")):
        sources = [one for one in itertools.product(first.split(","), repeat=3) if ("P" in one) == (kind != "moves")]
        targets = list(itertools.product(["R", "S0", "S1"], repeat=3))
        told = [_explained(*pair) for pair in itertools.product(sources, targets) if pair[0] != pair[1]]
        for what in ("collectives", "elements"):
            stock, overlay = (sum(_count(getattr(one, side), what) for one in told) for side in ("torch", "overlay"))
            found[f"{kind}.{what}"] = stock, overlay
    return found


def uneven() -> Counted:
    """Lengths of a vector, 1 to 16, that come back wrong from a flattened 2 x 2 mesh of gloo ranks."""
    from benchmarks import process

    found = process.ranks("uneven:wrong", 4, longest=16)
    return {"wrong.lengths": (found["stock"], found["overlay"])}


RECIPES: dict[str, Callable[[], Counted]] = {"groups": groups, "pairs": pairs, "uneven": uneven}


def _explained(source: tuple[str, ...], target: tuple[str, ...]) -> Any:
    import torch

    from torch_overlay.show import asked, words
    from torch_overlay.show.placements import regions
    from torch_overlay.show.question import Question, cost_of, laid_out

    sizes, shape, names = (2, 2, 2), (16, 16), ("a", "b", "c")
    ends = [words.placements(",".join(end), len(sizes)) for end in (source, target)]
    before, after = (regions(end, shape, sizes) for end in ends)
    question = Question(
        words=("·".join(source), "·".join(target)),
        shape=shape,
        sizes=sizes,
        source=before,
        target=after,
        refused="",
        names=names,
        ranks=laid_out(sizes, None),
        dtype="float32",
        itemsize=4,
        groups=None,
        cost=cost_of(names, None),
    )
    flattened = [axes for count in (2, 3) for axes in itertools.combinations(range(3), count)]
    return asked.of_words(question, ends, torch.float32, "cuda", flattened)


def _count(side: Any, what: str) -> int:
    if side.lines and side.incoming is None:
        raise ValueError(f"{side.name} has a step whose bytes aren't known: {side.lines}")
    return side.collectives if what == "collectives" else side.incoming // 4
