"""The table of docs/retired.md: each patch of the series, and the upstream change that ends it."""

from __future__ import annotations

from itertools import groupby

from torch_overlay.patch import Kind, Patch
from torch_overlay.series import PATCHES

from . import marks

# What each upstream change brings, as far as it ends our rows. A test demands an entry for each that the series names.
BRINGS = {
    "pytorch/pytorch#175571": "all views of a root mesh share one state: rank map, groups, flattened views",
    "pytorch/pytorch#194457": "collectives over a flattened mesh are merged only where the shards are even",
    "pytorch/pytorch#190431": "names of groups agree on all ranks, whoever made which groups before",
    "pytorch/pytorch#187380": "a redistribution costs less CPU time",
    "pytorch/pytorch#169439": "the estimated cost of a redistribution agrees with the plan that runs",
    "pytorch/pytorch#173815": "a mesh can be aborted (`DeviceMesh.abort`, in torch from 2.15 on)",
}


def link(ends: str) -> str:
    """A pull request or an issue as a Markdown link; the address of a pull request leads to an issue, too."""
    repository, _, number = ends.partition("#")
    return f"[#{number}](https://github.com/{repository}/pull/{number})"


def part() -> str:
    """The rows by the change that ends them, in the order of the series."""
    ends = sorted(PATCHES, key=lambda patch: _first(patch.ends))
    rows = [
        [link(change) if change else "-", _cell(patches), BRINGS.get(change or "", _HOOKS)]
        for change, patches in ((change, list(found)) for change, found in groupby(ends, key=lambda one: one.ends))
    ]
    return marks.table(["ended by", "rows of `series.py`", "when upstream has this"], rows)


_HOOKS = "these clear caches and edit registries for the other rows, and go with them"


def _first(change: str | None) -> int:
    """Where a change first ends a row; rows that none ends come last."""
    changes = [patch.ends for patch in PATCHES]
    return changes.index(change) if change else len(changes)


def _cell(patches: list[Patch]) -> str:
    return ", ".join(map(said, patches))


def said(patch: Patch) -> str:
    """A row in a cell: the name of its target, and the releases that it is limited to."""
    name = patch.qualname or f"{patch.module.rpartition('.')[2]} (hook)"
    name = f"{patch.module.rpartition('.')[2]} (hook)" if patch.kind is Kind.HOOK else name
    limits = [f"from {patch.since}"] if patch.since else []
    limits += [f"before {patch.until}"] if patch.until else []
    return f"`{name}`" + (f" ({', '.join(limits)})" if limits else "")
