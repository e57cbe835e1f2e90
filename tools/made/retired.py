"""The table of docs/developers/retired.md: each patch of the series, and the upstream change that ends it."""

from __future__ import annotations

from itertools import groupby

from torch_overlay.patching.patch import Kind, Patch
from torch_overlay.series import PATCHES

from . import marks

# What each upstream change brings, as far as it ends our rows. A test demands an entry for each that the series names.
BRINGS = {
    "pytorch/pytorch#175571": "all views of a root mesh share one state: rank map, groups, flattened views",
    "pytorch/pytorch#194457": "collectives over a flattened mesh are merged only where the shards are even",
    "pytorch/pytorch#190431": "names of groups agree on all ranks, whoever made which groups before",
    "pytorch/pytorch#187380": "a redistribution costs less CPU time",
    "pytorch/pytorch#188215": "a group can be an input of a graph that is compiled on one rank (in torch from 2.14 on)",
    "pytorch/pytorch#173815": "a mesh can be aborted (`DeviceMesh.abort`, in torch from 2.15 on)",
}


def link(ends: str) -> str:
    """A pull request or an issue as a Markdown link; the address of a pull request leads to an issue, too."""
    repository, _, number = ends.partition("#")
    return f"[#{number}](https://github.com/{repository}/pull/{number})"


def part() -> str:
    """The rows by the change that ends them and by their kind, in the order of the series."""
    rows, before = [], ""
    for (change, kind), found in groupby(sorted(PATCHES, key=_order), key=lambda patch: (patch.ends, patch.kind)):
        ended = link(change) if change else "-"
        brings = BRINGS.get(change or "", _HOOKS) if ended != before else ""
        rows.append([ended, kind.value, ", ".join(map(said, found)), brings])
        before = ended
    return marks.table(["ended by", "how", "rows of `series.py`", "when upstream has this"], rows)


_HOOKS = "these clear caches and edit registries for the other rows, and go with them"


def _order(patch: Patch) -> tuple[int, int]:
    """By the change that ends a row, where it first does, then by kind; rows that none ends come last."""
    changes = [other.ends for other in PATCHES]
    first = changes.index(patch.ends) if patch.ends else len(changes)
    return first, [*Kind].index(patch.kind)


def said(patch: Patch) -> str:
    """A row in a cell: the name of its target, and the releases that it is limited to."""
    module = patch.module.rpartition(".")[2]
    name = patch.qualname or module
    return f"`{name}`" + (f" (torch {patch.releases})" if patch.releases else "")
