"""A mesh drawn: its ranks, the hosts they sit on and each axis's groups, as text and as a picture. Needs no torch.

A picture has a panel an axis, every rank in the colour of its group, hosts framed. It needs matplotlib
(`pip install torch-overlay[plot]`), imported when something is drawn.
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
    """One axis and its groups.

    Attributes:
        name: of the axis.
        groups: the ranks of each, in the mesh's order; together they hold each rank of the mesh once.
        label: all its names, where axes of several meshes have these groups.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    label: str

    @property
    def size(self) -> int:
        """Ranks in a group."""
        return len(self.groups[0])

    def group_of(self) -> dict[int, int]:
        """From rank to the number of its group."""
        return {rank: number for number, group in enumerate(self.groups) for rank in group}

    def reach(self, gpus_per_host: int) -> str:
        """Whether its collectives leave a host: what decides how fast they are."""
        hosts = max(len({rank // gpus_per_host for rank in group}) for group in self.groups)
        return "no communication" if self.size == 1 else "inside a host" if hosts == 1 else f"over {hosts} hosts"


@dataclass(frozen=True)
class MeshMap:
    """The ranks of a mesh and its axes; the axes of several meshes over the same ranks, if they are shown together.

    >>> MeshMap.of(("dp", "tp"), (2, 2), (0, 1, 2, 3)).axes[0]  # dp's groups step over tp
    Axis(name='dp', groups=((0, 2), (1, 3)), label='dp')
    """

    title: str
    ranks: tuple[int, ...]
    axes: tuple[Axis, ...]
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(names: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> MeshMap:
        """Of a mesh, from its ranks row-major over the axes."""
        axes = [Axis(name, _groups(axis, sizes, ranks), name) for axis, name in enumerate(names)]
        return MeshMap(sized(names, sizes), tuple(ranks), tuple(axes))

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


# --- all meshes of a run ---


def of_degrees(dims: ParallelDims) -> MeshMap:
    """The axes of all meshes, those with the same groups as one.

    Args:
        dims: with every degree known, as `ParallelDims.fit` gives them.

    >>> [axis.label for axis in of_degrees(ParallelDims(tp=2).fit(4)).axes]  # without ep, all ranks shard the experts
    ['world = efsdp', 'pp = dp_replicate = ep = etp = cp', 'fsdp = batch = loss', 'tp']
    """
    sizes = dims.sizes()
    ranks = tuple(range(sizes["world"]))
    found: dict[tuple[tuple[int, ...], ...], dict[str, None]] = {}  # the names of the axes with these groups
    for names in (*MESHES.values(), ("pp", "loss", "tp")):  # loss is axes of the data mesh, joined to one
        for axis in MeshMap.of(names, [sizes[name] for name in names], ranks).axes:
            found.setdefault(axis.groups, {})[axis.name] = None
    axes = [Axis(next(iter(names)), groups, " = ".join(names)) for groups, names in found.items()]
    meshes = {**MESHES, "loss": ("loss",)}
    notes = [f"{mesh:8}{sized(names, [sizes[name] for name in names])}" for mesh, names in meshes.items()]
    named = [f"{each.name}={getattr(dims, each.name)}" for each in fields(dims) if getattr(dims, each.name) > 1]
    return MeshMap(" ".join(named) or "one rank", ranks, tuple(axes), tuple(notes))


# --- text ---


@dataclass(frozen=True, repr=False)
class Drawing(screen.Shown):
    """A mesh, its hosts and each axis's groups. Print it.

    Attributes:
        mesh: what is drawn.
        gpus_per_host: ranks are on hosts in their order, this many on each.

    Raises ValueError without a GPU on a host.

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
        """Of a mesh, or of all meshes of a run, whose axes with the same groups are shown as one."""
        if isinstance(mesh, ParallelMeshes):
            mesh = of_degrees(mesh.degrees)
        elif not isinstance(mesh, MeshMap):
            if not hasattr(mesh, "mesh_dim_names"):
                raise TypeError(f"draw() needs a DeviceMesh, got {type(mesh).__name__}")
            names = mesh.mesh_dim_names or typed.names(None, mesh.ndim)
            mesh = MeshMap.of(tuple(names), tuple(mesh.shape), mesh.mesh.flatten().tolist())
        return Drawing(mesh, gpus_per_host)

    @property
    def title(self) -> str:
        """What is drawn, and on how many hosts."""
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
        """A row an axis, with as many of its groups as there is room for."""
        rows = [("axis", "size", "groups", "reaches")]
        for axis in self.mesh.axes:
            rows.append((axis.label, str(axis.size), str(len(axis.groups)), axis.reach(self.gpus_per_host)))
        left = folded(rows, width - max(24, width // 3), {0: " = "}, right=(1, 2))
        start = max(len(line) for row in left for line in row) + 2
        said = ["the groups' ranks", *(_groups_in(axis, width - start) for axis in self.mesh.axes)]
        found = []
        for (first, *others), text in zip(left, said):
            found += [f"{first:{start}}{text}", *(f"  {line}" for line in others)]
        return screen.headed(found)

    def save(self, path: str) -> None:
        """Write a picture: a panel an axis, each rank in the colour of its group, hosts framed; see `Shown.save`."""
        _draw(self, path)


_MOST_GROUPS = 8


def _groups_in(axis: Axis, room: int) -> str:
    """The ranks of the first groups, as many as there is room for."""
    said = ""
    for number, group in enumerate(axis.groups[:_MOST_GROUPS]):
        longer = f"{said} | {ranks_text(group)}" if number else ranks_text(group)
        more = " | ..." if number + 1 < len(axis.groups) else ""
        if len(longer + more) > room:
            return f"{said} | ..." if said else longer[: room - 3] + "..."
        said = longer
    return said + (" | ..." if len(axis.groups) > _MOST_GROUPS else "")


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_MOST_ROWS = 64
_MOST_IN_ROW = 32


def _grid(mesh: MeshMap, hosts: list[list[int]], width: int) -> list[str]:
    """One row a host: its ranks, and for each axis a letter a rank, the same for ranks of one group. The axes that
    don't fit beside the others come below."""
    rows = [ranks[i : i + _MOST_IN_ROW] for ranks in hosts for i in range(0, len(ranks), _MOST_IN_ROW)]
    if len(rows) > _MOST_ROWS:
        return ["", f"{len(hosts)} hosts: draw a picture to see them"]
    axes = mesh.telling()
    left = ["ranks", *map(ranks_text, rows)]
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
    host = "a row a host" if len(rows) == len(hosts) else f"a row for up to {_MOST_IN_ROW} ranks of a host"
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
        found.append(screen.Styled(text.rstrip(), "", parts))
    return found


# --- the picture ---

MOST_RANKS = 4096
MOST_COLORS = 20  # with more groups some colours can't be told apart, and the groups are numbered
_GAP = 0.5  # between hosts, in cells
_TITLE = 0.85  # of a panel, its three or four lines, in inches; as is the next
_WIDEST = 22.0


def _draw(drawing: Drawing, path: str) -> None:
    mesh = drawing.mesh
    if len(mesh.ranks) > MOST_RANKS:
        raise ValueError(f"a picture shows at most {MOST_RANKS} ranks, got {len(mesh.ranks)}: draw a smaller mesh")
    grid, axes, notes = _Grid(mesh.hosts(drawing.gpus_per_host)), mesh.telling(), _notes(mesh)
    columns = _columns(len(axes), grid)
    rows = math.ceil(len(axes) / columns)
    width = min(_WIDEST, max(7.0, 3.4 * columns, 0.42 * grid.width * columns))
    height = (width / columns * grid.height / grid.width + _TITLE) * rows + 0.9 + 0.19 * len(notes)
    with pictures.figure(path, figsize=(width, height), layout="constrained") as made:
        panels = made.subplots(rows, columns, squeeze=False).flatten()
        made.get_layout_engine().set(h_pad=0.12)  # so that the panels' titles keep off the whole's
        cell = 72 * (width - 0.4) / columns / grid.width  # points
        for panel, axis in zip(panels, axes):
            _panel(panel, axis, grid, drawing.gpus_per_host, cell)
        for panel in panels[len(axes) :]:
            panel.axis("off")
        made.suptitle(drawing.title, fontweight="bold")
        _legend(made, min(mesh.ranks), notes)


def _columns(panels: int, grid: _Grid) -> int:
    """Panels beside each other, so that the whole is about half as wide again as high and few places stay empty."""

    def unlike(columns: int) -> float:
        rows = math.ceil(panels / columns)
        wide = 0.42 * grid.width * columns / ((0.42 * grid.height + _TITLE) * rows)
        return abs(math.log(wide / 1.5)) + 0.2 * (rows * columns - panels)

    return min(range(1, panels + 1), key=unlike)


def _legend(figure: Any, first: int, notes: list[str]) -> None:
    """What the colours and frames mean, and what is left out, under the panels."""
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
    """What says nothing as a panel, axes whose groups are the whole world or every rank by itself; and the meshes."""
    lines = []
    for axis in mesh.axes:
        if axis not in mesh.telling():
            what = "every rank by itself" if axis.size == 1 else "one group of all ranks"
            lines.append(f"{what}: {axis.label}")
    return [*lines, *mesh.notes]


class _Grid:
    """Where each rank is drawn: hosts as blocks, the blocks in rows that make the whole about as wide as high."""

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
