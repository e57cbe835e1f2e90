"""Draws a mesh: its ranks, their hosts, and the groups of each axis, as text and as a picture. Imports no torch.

A picture has a panel for each axis, with every rank in the colour of its group, and a frame around each host. It needs
matplotlib (`pip install torch-overlay[plot]`), which is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..distributed._mesh.text import ranks_text
from ..distributed._mesh_layout import row_major
from ..parallel_dims import MESHES, ParallelDims, ParallelMeshes
from . import pictures, screen, typed
from .words import counted, fitted, folded, sized, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh and its groups.

    Attributes:
        name: the axis's name.
        groups: the ranks of each group, in the mesh's order. Each rank of the mesh is in one of them.
        label: the name, or all names if axes of several meshes have these groups.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    label: str

    @property
    def size(self) -> int:
        """Ranks in a group."""
        return len(self.groups[0])

    def group_of(self) -> dict[int, int]:
        """For each rank, the number of its group."""
        return {rank: number for number, group in enumerate(self.groups) for rank in group}

    def reach(self, gpus_per_host: int) -> str:
        """Say whether this axis stays inside a host, which decides how fast it is; "no communication" in groups of
        one."""
        hosts = max(len({rank // gpus_per_host for rank in group}) for group in self.groups)
        return "no communication" if self.size == 1 else "inside a host" if hosts == 1 else f"over {hosts} hosts"


@dataclass(frozen=True)
class MeshMap:
    """The ranks of a mesh and its axes. Several meshes over the same ranks can be one map, with the axes of all.

    >>> MeshMap.of(("dp", "tp"), (2, 2), (0, 1, 2, 3)).axes[0]  # dp's groups step over tp
    Axis(name='dp', groups=((0, 2), (1, 3)), label='dp')
    """

    title: str
    ranks: tuple[int, ...]
    axes: tuple[Axis, ...]
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> MeshMap:
        """The map of a mesh, from its ranks in row-major order over the axes."""
        axes = [Axis(name, _groups(axis, sizes, ranks), name) for axis, name in enumerate(names)]
        return MeshMap(sized(names, sizes), tuple(ranks), tuple(axes))

    def drawn_axes(self) -> tuple[Axis, ...]:
        """The axes with several groups of several ranks; else those with several ranks in a group, else all."""
        large = tuple(axis for axis in self.axes if axis.size > 1)
        return tuple(axis for axis in large if len(axis.groups) > 1) or large or self.axes

    def hosts(self, gpus_per_host: int) -> list[list[int]]:
        """The ranks of the mesh on each host, ascending. Hosts without ranks of the mesh are left out."""
        ranks_of: dict[int, list[int]] = {}
        for rank in sorted(self.ranks):
            ranks_of.setdefault(rank // gpus_per_host, []).append(rank)
        return list(ranks_of.values())


def _groups(axis: int, sizes: Sequence[int], ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group of an axis, from the mesh's sizes and its ranks, row-major."""
    # Along an axis, ranks of one group are `step` positions apart; a group starts where the axis's coordinate is 0.
    step, size = row_major(sizes)[axis], sizes[axis]
    starts = [at for at in range(len(ranks)) if at // step % size == 0]
    return tuple(tuple(ranks[start + step * i] for i in range(size)) for start in starts)


# --- all meshes of a run ---


def of_degrees(dims: ParallelDims) -> MeshMap:
    """The axes of all meshes of a run. Axes with the same groups are one axis with several names.

    >>> [axis.label for axis in of_degrees(ParallelDims(tp=2).fit(4)).axes]  # without ep, all ranks shard the experts
    ['world = efsdp', 'pp = dp_replicate = ep = etp = cp', 'fsdp = batch = loss', 'tp']
    """
    sizes = dims.sizes()
    ranks = tuple(range(sizes["world"]))
    # A run has eleven axes on five meshes, and many of them have the same groups: tp of dense and of data, say.
    names_by_groups: dict[tuple[tuple[int, ...], ...], dict[str, None]] = {}
    for names in (*MESHES.values(), ("pp", "loss", "tp")):  # loss is axes of the data mesh, joined to one
        for axis in MeshMap.of(names, [sizes[name] for name in names], ranks).axes:
            names_by_groups.setdefault(axis.groups, {})[axis.name] = None
    axes = [Axis(next(iter(names)), groups, " = ".join(names)) for groups, names in names_by_groups.items()]
    meshes = {**MESHES, "loss": ("loss",)}
    notes = [f"{mesh:8}{sized(names, [sizes[name] for name in names])}" for mesh, names in meshes.items()]
    degrees = {degree.name: getattr(dims, degree.name) for degree in fields(dims)}
    title = " ".join(f"{name}={size}" for name, size in degrees.items() if size > 1) or "one rank"
    return MeshMap(title, ranks, tuple(axes), tuple(notes))


# --- text ---


@dataclass(frozen=True, repr=False)
class Drawing(screen.Shown):
    """A mesh, its hosts and each axis's groups. Print it.

    Attributes:
        mesh: what is drawn.
        gpus_per_host: how many ranks each host has. Ranks are on hosts in ascending order.

    Raises:
        ValueError: `gpus_per_host` is less than 1.

    >>> print(Drawing(MeshMap.of(("dp", "tp"), (2, 2), range(4)), gpus_per_host=2))
    dp=2 x tp=2: 4 ranks on 2 hosts of 2
    <BLANKLINE>
    axis  size  groups  reaches        the groups' ranks
    dp       2       2  over 2 hosts   0, 2 | 1, 3
    tp       2       2  inside a host  0, 1 | 2, 3
    <BLANKLINE>
    ranks  dp  tp
    0, 1   ab  aa
    2, 3   ab  bb
    a row a host, a letter a rank; ranks of one group have the same letter
    """

    mesh: MeshMap
    gpus_per_host: int = 8

    def __post_init__(self) -> None:
        if self.gpus_per_host < 1:
            raise ValueError(f"gpus_per_host must be at least 1, got {self.gpus_per_host}")

    @staticmethod
    def of(mesh: DeviceMesh | ParallelMeshes | MeshMap, gpus_per_host: int = 8) -> Drawing:
        """Return the drawing of a mesh, or of all meshes of a run; axes with the same groups are drawn as one."""
        if isinstance(mesh, ParallelMeshes):
            mesh = of_degrees(mesh.degrees)
        elif not isinstance(mesh, MeshMap):
            if not hasattr(mesh, "mesh_dim_names"):
                raise TypeError(f"draw() needs a DeviceMesh, got {type(mesh).__name__}")
            names = mesh.mesh_dim_names or typed.parse_names(None, mesh.ndim)
            mesh = MeshMap.of(tuple(names), tuple(mesh.shape), mesh.mesh.flatten().tolist())
        return Drawing(mesh, gpus_per_host)

    @property
    def title(self) -> str:
        """The mesh and how many hosts it is on, as text."""
        ranks, hosts = len(self.mesh.ranks), len(self.mesh.hosts(self.gpus_per_host))
        return f"{self.mesh.title}: {counted(ranks, 'rank')} on {counted(hosts, 'host')} of {self.gpus_per_host}"

    def lines(self, width: int = screen.NARROW) -> list[str]:
        """The drawing for a terminal of this many columns."""
        notes = [line for note in self.mesh.notes for line in fitted(note, width)]
        return [
            *screen.styled(fitted(self.title, width), "title"),
            *(["", *notes] if notes else []),
            "",
            *self._table(width),
            *_grid(self.mesh, self.mesh.hosts(self.gpus_per_host), width),
        ]

    def _table(self, width: int) -> list[str]:
        """A row for each axis, with as many of its groups as there is room for."""
        rows = [("axis", "size", "groups", "reaches")]
        for axis in self.mesh.axes:
            rows.append((axis.label, str(axis.size), str(len(axis.groups)), axis.reach(self.gpus_per_host)))
        left = folded(rows, width - max(24, width // 3), {0: " = "}, right=(1, 2))
        start = max(len(line) for row in left for line in row) + 2
        right = ["the groups' ranks", *(_groups_text(axis, width - start) for axis in self.mesh.axes)]
        lines = []
        for (first, *others), text in zip(left, right):
            lines += [f"{first:{start}}{text}", *(f"  {line}" for line in others)]
        return screen.headed(lines)

    def save(self, path: str) -> None:
        """Write a picture with a panel for each axis. The ending of `path` chooses the format."""
        _draw(self, path)


_MOST_GROUPS = 8


def _groups_text(axis: Axis, columns: int) -> str:
    """The ranks of the first groups, of as many as fit into this many columns; dots stand for the others."""
    text = ""
    for number, group in enumerate(axis.groups[:_MOST_GROUPS]):
        longer = f"{text} | {ranks_text(group)}" if number else ranks_text(group)
        more = " | ..." if number + 1 < len(axis.groups) else ""
        if len(longer + more) > columns:
            return f"{text} | ..." if text else longer[: columns - 3] + "..."
        text = longer
    return text + (" | ..." if len(axis.groups) > _MOST_GROUPS else "")


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_MOST_ROWS = 64
_MOST_IN_ROW = 32


def _grid(mesh: MeshMap, hosts: list[list[int]], width: int) -> list[str]:
    """A row for each host: its ranks, and for each axis a letter for each rank, the same for ranks of one group."""
    rows = [ranks[i : i + _MOST_IN_ROW] for ranks in hosts for i in range(0, len(ranks), _MOST_IN_ROW)]
    if len(rows) > _MOST_ROWS:
        return ["", f"{len(hosts)} hosts: draw a picture to see them"]
    axes = mesh.drawn_axes()
    left = ["ranks", *map(ranks_text, rows)]
    margin, cell = max(map(len, left)), max(map(len, rows))
    lines: list[str] = []
    while axes:
        count, used = 0, margin
        # At least one, however narrow the terminal is: else this would never end.
        while count < len(axes) and (count == 0 or used + 2 + max(cell, len(axes[count].name)) <= width):
            used += 2 + max(cell, len(axes[count].name))
            count += 1
        lines += ["", *_block(left, margin, cell, axes[:count], rows)]
        axes = axes[count:]
    most = max(len(axis.groups) for axis in mesh.drawn_axes())
    again = f"; after {len(_LETTERS)} groups the letters start again" if most > len(_LETTERS) else ""
    host = "a row a host" if len(rows) == len(hosts) else f"a row for up to {_MOST_IN_ROW} ranks of a host"
    note = f"{host}, a letter a rank; ranks of one group have the same letter{again}"
    return [*lines, *screen.styled(wrapped(note, "", width), "why")]


def _block(left: list[str], margin: int, cell: int, axes: Sequence[Axis], rows: list[list[int]]) -> list[str]:
    """The rows for these axes, each letter in the colour of its group."""
    widths = [max(cell, len(axis.name)) for axis in axes]
    head = "  ".join([left[0].ljust(margin), *(axis.name.ljust(w) for axis, w in zip(axes, widths))])
    lines = screen.styled([head.rstrip()], "head")
    numbers = [axis.group_of() for axis in axes]
    for label, ranks in zip(left[1:], rows):
        text, parts = label.ljust(margin), []
        for number, wide in zip(numbers, widths):
            text += "  "
            for rank in ranks:
                parts.append((len(text), len(text) + 1, screen.COLORS[number[rank] % len(screen.COLORS)]))
                text += _LETTERS[number[rank] % len(_LETTERS)]
            text += " " * (wide - len(ranks))
        lines.append(screen.Styled(text.rstrip(), "", parts))
    return lines


# --- the picture ---

MOST_RANKS = 4096
MOST_COLORS = 20  # with more groups some colours look alike, so the groups are numbered, too
_GAP = 0.5  # between hosts, in cells
_TITLE = 0.85  # the height of a panel's title, three or four lines, in inches
_WIDEST = 22.0  # inches


def _draw(drawing: Drawing, path: str) -> None:
    mesh = drawing.mesh
    if len(mesh.ranks) > MOST_RANKS:
        raise ValueError(f"a picture shows at most {MOST_RANKS} ranks, got {len(mesh.ranks)}: draw a smaller mesh")
    grid, axes, notes = _Grid(mesh.hosts(drawing.gpus_per_host)), mesh.drawn_axes(), _notes(mesh)
    columns = _columns(len(axes), grid)
    rows = math.ceil(len(axes) / columns)
    width = min(_WIDEST, max(7.0, 3.4 * columns, 0.42 * grid.width * columns))
    height = (width / columns * grid.height / grid.width + _TITLE) * rows + 0.9 + 0.19 * len(notes)
    with pictures.figure(path, figsize=(width, height), layout="constrained") as whole:
        panels = whole.subplots(rows, columns, squeeze=False).flatten()
        whole.get_layout_engine().set(h_pad=0.12)  # else the panels' titles touch the title of the picture
        cell = 72 * (width - 0.4) / columns / grid.width  # points
        for panel, axis in zip(panels, axes):
            _panel(panel, axis, grid, drawing.gpus_per_host, cell)
        for panel in panels[len(axes) :]:
            panel.axis("off")
        whole.suptitle(drawing.title, fontweight="bold")
        _legend(whole, min(mesh.ranks), notes)


def _columns(panels: int, grid: _Grid) -> int:
    """How many panels stand side by side: the picture is about 1.5 times as wide as high, with few empty places."""

    def unlike(columns: int) -> float:
        rows = math.ceil(panels / columns)
        wide = 0.42 * grid.width * columns / ((0.42 * grid.height + _TITLE) * rows)
        return abs(math.log(wide / 1.5)) + 0.2 * (rows * columns - panels)

    return min(range(1, panels + 1), key=unlike)


def _legend(figure: Any, first: int, notes: list[str]) -> None:
    """Write below the panels what colours and frames mean, and what isn't drawn."""
    from matplotlib.patches import Patch

    marks = [Patch(facecolor=pictures.INK, label=f"rank {first}'s group")]
    marks += [Patch(facecolor=pictures.group_color(1), label="one colour: one group")]
    marks += [Patch(facecolor="white", edgecolor=pictures.INK, label="frame: a host")]
    legend = figure.legend(
        handles=marks,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=10,
        title="\n".join(notes),
        title_fontproperties={"family": "monospace", "size": 9},
    )
    legend.get_title().set_multialignment("left")


def _notes(mesh: MeshMap) -> list[str]:
    """Lines about the axes that aren't drawn, since they have one group or groups of one rank; and about the meshes."""
    lines = []
    for axis in mesh.axes:
        if axis not in mesh.drawn_axes():
            what = "every rank by itself" if axis.size == 1 else "one group of all ranks"
            lines.append(f"{what}: {axis.label}")
    return [*lines, *mesh.notes]


class _Grid:
    """Where each rank is drawn. A host is a block of cells, and the blocks stand in rows."""

    def __init__(self, hosts: list[list[int]]) -> None:
        most = max(map(len, hosts))
        self.across = most if len(hosts) <= 8 and most <= 16 else math.ceil(math.sqrt(2 * most))
        self.down = math.ceil(most / self.across)
        block = (self.across + _GAP, self.down + _GAP)
        # About one and a half times as wide as high, with full rows if some number near that gives them.
        ideal = min(len(hosts), max(1, round(math.sqrt(1.5 * len(hosts) * block[1] / block[0]))))
        near = [n for n in range(max(1, ideal - 2), ideal + 3) if len(hosts) % n == 0]
        self.in_row = min(near, key=lambda n: abs(n - ideal), default=ideal)
        self.width = self.in_row * block[0]
        self.height = math.ceil(len(hosts) / self.in_row) * block[1]
        self.corners = [(i % self.in_row * block[0], i // self.in_row * block[1]) for i in range(len(hosts))]
        self.places = {
            rank: (left + i % self.across, top + i // self.across)
            for ranks, (left, top) in zip(hosts, self.corners)
            for i, rank in enumerate(ranks)
        }


def _panel(axes: Axes, axis: Axis, grid: _Grid, gpus_per_host: int, cell: float) -> None:
    """Draw one axis: each rank in the colour of its group, numbered if there is room, in frames of hosts."""
    groups = axis.group_of()
    first = groups[min(groups)]
    frames = [((left - 0.12, top - 0.12), grid.across + 0.24, grid.down + 0.24) for left, top in grid.corners]
    pictures.fill(axes, frames, ["white"] * len(frames), pictures.INK, 1.0)
    boxes = [((left + 0.06, top + 0.06), 0.88, 0.88) for left, top in grid.places.values()]
    colors = [pictures.INK if groups[rank] == first else pictures.group_color(groups[rank]) for rank in grid.places]
    pictures.fill(axes, boxes, colors, "none", 0.0)
    many = len(axis.groups) > MOST_COLORS
    size = min(10.0, cell / (0.75 * len(str(max(groups))) + 0.6))
    numbered = many and size >= 5
    for rank, (left, top) in grid.places.items() if size >= 3 else ():
        color = "white" if groups[rank] == first else pictures.INK
        where: dict[str, Any] = dict(ha="center", va="center", color=color, in_layout=False)  # it lies in its box
        axes.text(left + 0.5, top + (0.38 if numbered else 0.54), str(rank), fontsize=size, **where)
        if numbered:
            axes.text(left + 0.5, top + 0.75, f"g{groups[rank]}", fontsize=0.7 * size, **where)
    axes.set(xlim=(-0.3, grid.width), ylim=(grid.height, -0.3), aspect="equal")
    axes.axis("off")
    what = f"{counted(len(axis.groups), 'group')} of {axis.size}, {axis.reach(gpus_per_host)}"
    text = ranks_text(axis.groups[first])
    text = text if len(text) < 50 else text[:47] + "..."
    lines = [axis.label, what, f"rank {min(groups)}'s group: {text}"]
    if many:
        lines.append("g0, g1, ...: which group" if numbered else "too many for colours: like colours may be two groups")
    axes.set_title("\n".join(lines), fontsize=10)
