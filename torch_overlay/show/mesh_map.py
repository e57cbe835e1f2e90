"""A mesh as a picture shows it: its ranks, the hosts they sit on, and each axis's groups. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..distributed._layout import row_major
from ..distributed._rank_map import short
from .columns import aligned
from .words import counted


@dataclass(frozen=True)
class Axis:
    """One axis and its groups.

    Attributes:
        name: of the axis.
        groups: the ranks of each, in the mesh's order; together they hold each rank of the mesh once.
        label: the name in full, where axes of several meshes have these groups.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    label: str = ""

    @property
    def size(self) -> int:
        """Ranks in a group."""
        return len(self.groups[0])

    def group_of(self) -> dict[int, int]:
        """From rank to the number of its group."""
        return {rank: number for number, group in enumerate(self.groups) for rank in group}

    def hosts(self, gpus_per_host: int) -> int:
        """The hosts that a group reaches, at most."""
        return max(len({rank // gpus_per_host for rank in group}) for group in self.groups)

    def reach(self, gpus_per_host: int) -> str:
        """Whether its collectives leave a host: what decides how fast they are."""
        hosts = self.hosts(gpus_per_host)
        return "no communication" if self.size == 1 else "inside a host" if hosts == 1 else f"over {hosts} hosts"


@dataclass(frozen=True)
class MeshMap:
    """The ranks of a mesh and its axes; the axes of several meshes over the same ranks, if they are shown together.

    >>> MeshMap.of(("dp", "tp"), (2, 2), (0, 1, 2, 3)).axes[0]  # dp's groups step over tp
    Axis(name='dp', groups=((0, 2), (1, 3)), label='')
    """

    title: str
    ranks: tuple[int, ...]
    axes: tuple[Axis, ...]
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> MeshMap:
        """Read a mesh.

        Args:
            ranks: row-major over the axes.

        Raises:
            ValueError: not one name for each size, or not one rank for each coordinate.
        """
        if len(names) != len(sizes) or math.prod(sizes) != len(ranks):
            raise ValueError(f"a mesh needs a name a size and a rank a place: got {names}, {sizes}, {len(ranks)} ranks")
        title = " x ".join(f"{name}={size}" for name, size in zip(names, sizes))
        axes = [Axis(name, _groups(axis, sizes, ranks)) for axis, name in enumerate(names)]
        return MeshMap(title, tuple(ranks), tuple(axes))

    def telling(self) -> tuple[Axis, ...]:
        """The axes that there is something to see of: they join ranks, and tell them apart if any axis does."""
        joining = tuple(axis for axis in self.axes if axis.size > 1)
        return tuple(axis for axis in joining if len(axis.groups) > 1) or joining or self.axes

    def hosts(self, gpus_per_host: int) -> list[list[int]]:
        """The ranks of the mesh on each host, ascending; hosts without any are left out."""
        found: dict[int, list[int]] = {}
        for rank in sorted(self.ranks):
            found.setdefault(rank // gpus_per_host, []).append(rank)
        return list(found.values())


def _groups(axis: int, sizes: Sequence[int], ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    step, size = row_major(sizes)[axis], sizes[axis]
    starts = [at for at in range(len(ranks)) if at // step % size == 0]
    return tuple(tuple(ranks[start + step * i] for i in range(size)) for start in starts)


def text(mesh: MeshMap, gpus_per_host: int) -> str:
    """The mesh for the terminal: one line an axis, and a grid of letters while it fits."""
    hosts = mesh.hosts(gpus_per_host)
    lines = [
        f"{mesh.title}: {counted(len(mesh.ranks), 'rank')} on {counted(len(hosts), 'host')} of {gpus_per_host}",
        *(["", *mesh.notes] if mesh.notes else []),
        "",
    ]
    rows = [("axis", "size", "groups", "reaches", "the groups' ranks")]
    for axis in mesh.axes:
        shown = [short(group) for group in axis.groups[:4]]
        more = f" | ... {len(axis.groups)} in all" if len(axis.groups) > 4 else ""
        count = str(len(axis.groups))
        rows.append((axis.label or axis.name, str(axis.size), count, axis.reach(gpus_per_host), _bars(shown) + more))
    return "\n".join([*lines, *aligned(rows, right=(1, 2)), *_grid(mesh, hosts)])


def _bars(groups: list[str]) -> str:
    return " | ".join(groups)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_MOST_ROWS = 64


def _grid(mesh: MeshMap, hosts: list[list[int]]) -> list[str]:
    """One row a host: its ranks, and for each axis a letter a rank, the same for ranks of one group."""
    if len(hosts) > _MOST_ROWS:
        return ["", f"({len(hosts)} hosts: draw a picture to see them)"]
    axes = mesh.telling()
    rows = [("ranks", *(axis.name for axis in axes))]
    numbers = [axis.group_of() for axis in axes]
    for ranks in hosts:
        cells = ["".join(_LETTERS[number[rank] % len(_LETTERS)] for rank in ranks) for number in numbers]
        rows.append((short(ranks), *cells))
    most = max(len(axis.groups) for axis in axes)
    again = f"; after {len(_LETTERS)} groups the letters start again" if most > len(_LETTERS) else ""
    return ["", *aligned(rows), f"(a row a host, a letter a rank; ranks of one group have the same letter{again})"]
