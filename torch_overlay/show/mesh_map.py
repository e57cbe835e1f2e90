"""A mesh as a picture shows it: its ranks, the hosts they sit on, and each axis's groups. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..distributed._mesh.rank_map import short
from ..distributed._mesh_layout import row_major
from . import screen
from .columns import fitted, folded, wrapped
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


def lines(mesh: MeshMap, gpus_per_host: int, width: int) -> list[str]:
    """The mesh for the terminal: one line an axis, and a grid of letters while it fits."""
    hosts = mesh.hosts(gpus_per_host)
    on = f"{counted(len(mesh.ranks), 'rank')} on {counted(len(hosts), 'host')} of {gpus_per_host}"
    return [
        *screen.styled(fitted(f"{mesh.title}: {on}", width), "title"),
        *(["", *(line for note in mesh.notes for line in fitted(note, width))] if mesh.notes else []),
        "",
        *_table(mesh, gpus_per_host, width),
        *_grid(mesh, hosts, width),
    ]


_HEADS = ("axis", "size", "groups", "reaches")
_MOST_GROUPS = 8


def _table(mesh: MeshMap, gpus_per_host: int, width: int) -> list[str]:
    """A row an axis, with as many of its groups as there is room for."""
    rows = [_HEADS]
    for axis in mesh.axes:
        name = axis.label or axis.name
        rows.append((name, str(axis.size), str(len(axis.groups)), axis.reach(gpus_per_host)))
    left = folded(rows, width - max(24, width // 3), {0: " = "}, right=(1, 2))
    start = max(len(line) for row in left for line in row) + 2
    said = ["the groups' ranks", *(_groups_in(axis, width - start) for axis in mesh.axes)]
    found = []
    for (first, *others), text in zip(left, said):
        found += [f"{first:{start}}{text}", *(f"  {line}" for line in others)]
    return [*screen.styled(found[:1], "head"), *found[1:]]


def _groups_in(axis: Axis, room: int) -> str:
    """The ranks of the first groups, as many as there is room for."""
    said = ""
    for number, group in enumerate(axis.groups[:_MOST_GROUPS]):
        longer = f"{said} | {short(group)}" if number else short(group)
        more = " | ..." if number + 1 < len(axis.groups) else ""
        if len(longer + more) > room:
            return f"{said} | ..." if said else longer[: room - 3] + "..."
        said = longer
    return said + (" | ..." if len(axis.groups) > _MOST_GROUPS else "")


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_MOST_ROWS = 64
_MOST_RANKS = 32  # in a row


def _grid(mesh: MeshMap, hosts: list[list[int]], width: int) -> list[str]:
    """One row a host: its ranks, and for each axis a letter a rank, the same for ranks of one group. The axes that
    don't fit beside the others come below."""
    rows = [ranks[i : i + _MOST_RANKS] for ranks in hosts for i in range(0, len(ranks), _MOST_RANKS)]
    if len(rows) > _MOST_ROWS:
        return ["", f"{len(hosts)} hosts: draw a picture to see them"]
    axes = mesh.telling()
    left = ["ranks", *map(short, rows)]
    margin, cell = max(map(len, left)), max(map(len, rows))
    found: list[str] = []
    while axes:
        count, used = 0, margin
        while count < len(axes) and (count == 0 or used + 2 + max(cell, len(axes[count].name)) <= width):
            used += 2 + max(cell, len(axes[count].name))
            count += 1
        found += ["", *_block(left, margin, cell, axes[:count], rows)]
        axes = axes[count:]
    most = max(len(axis.groups) for axis in mesh.telling())
    again = f"; after {len(_LETTERS)} groups the letters start again" if most > len(_LETTERS) else ""
    host = "a row a host" if len(rows) == len(hosts) else f"a row for up to {_MOST_RANKS} ranks of a host"
    note = f"{host}, a letter a rank; ranks of one group have the same letter{again}"
    return [*found, *screen.styled(wrapped(note, "", width), "why")]


def _block(left: list[str], margin: int, cell: int, axes: Sequence[Axis], rows: list[list[int]]) -> list[str]:
    """The rows for these axes, each letter in the colour of its group."""
    widths = [max(cell, len(axis.name)) for axis in axes]
    head = "  ".join([left[0].ljust(margin), *(axis.name.ljust(w) for axis, w in zip(axes, widths))])
    found = screen.styled([head.rstrip()], "head")
    numbers = [axis.group_of() for axis in axes]
    for label, ranks in zip(left[1:], rows):
        text, parts = label.ljust(margin), []
        for number, wide in zip(numbers, widths):
            text += "  "
            for rank in ranks:
                parts.append((len(text), len(text) + 1, screen.COLORS[number[rank] % len(screen.COLORS)]))
                text += _LETTERS[number[rank] % len(_LETTERS)]
            text += " " * (wide - len(ranks))
        found.append(screen.Line(text.rstrip(), "", parts))
    return found
