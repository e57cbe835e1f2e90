"""What the tests of parallel dims share: a slow twin of nested loops, and all degrees there are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch_overlay
from torch_overlay.parallel_dims import ParallelDims

# torchtitan's recipe for a mixture of experts on 64 ranks.
RECIPE = ParallelDims(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=8)


class Twin:
    """The meshes of some degrees as tables that nobody can doubt: ranks are counted by nested loops.

    `at[mesh]` has, for each rank, its coordinate by axis name. An axis's group is every rank that agrees on the rest.
    """

    def __init__(self, pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int, ep: int, etp: int) -> None:
        self.at: dict[str, list[dict]] = {"world": [], "dense": [], "sparse": [], "data": [], "loss": []}
        loops = itertools.product(*map(range, (pp, dp_replicate, dp_shard, cp, tp)))
        for rank, (p, r, s, c, t) in enumerate(loops):
            self.at["world"].append({"world": rank})
            self.at["dense"].append({"pp": p, "dp_replicate": r, "fsdp": (s, c), "tp": t})
            self.at["data"].append({"pp": p, "batch": (r, s), "cp": c, "tp": t})
            self.at["loss"].append({"loss": (r, s, c), "pp": p, "tp": t})
        experts = [(e, x) for e in range(ep) for x in range(etp)]
        for p in range(pp):
            for r in range(dp_replicate):
                for place in range(dp_shard * cp * tp):
                    e, x = experts[place % len(experts)]
                    coordinate = {"pp": p, "dp_replicate": r, "efsdp": place // len(experts), "ep": e, "etp": x}
                    self.at["sparse"].append(coordinate)
        self.world_size = len(self.at["world"])

    def groups(self, mesh: str, axis: str) -> list[tuple[int, ...]]:
        """The ranks of every group of an axis."""
        found: dict[tuple, list[int]] = {}
        for rank, at in enumerate(self.at[mesh]):
            found.setdefault(tuple(value for name, value in at.items() if name != axis), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def axes(self) -> list[tuple[str, str]]:
        """(mesh, axis) of all axes; loss has one, though other coordinates tell its groups apart."""
        return [(mesh, axis) for mesh, at in self.at.items() for axis in at[0] if mesh != "loss" or axis == "loss"]

    def shape(self, mesh: str) -> tuple[int, ...]:
        """How many ranks each axis has: the values that its coordinate takes."""
        return tuple(len({at[axis] for at in self.at[mesh]}) for home, axis in self.axes() if home == mesh)


def all_degrees(world_size: int) -> Iterator[dict[str, int]]:
    """Every way to use a world of this many ranks."""
    for outer in _products(world_size, 5):
        for ep, etp, _ in _products(outer[2] * outer[3] * outer[4], 3):
            yield dict(zip(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"), (*outer, ep, etp), strict=True))


def _products(total: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (total,)
        return
    for first in range(1, total + 1):
        if total % first == 0:
            yield from ((first, *rest) for rest in _products(total // first, count - 1))


@contextlib.contextmanager
def overlay(on: bool, **options: str) -> Iterator[None]:
    """The overlay on inside, with these options, or torch as released."""
    if on:
        with torch_overlay.enabled(**options):
            yield
        return
    assert not torch_overlay.is_enabled(), "stock torch is asked for, but the overlay is on"
    yield
