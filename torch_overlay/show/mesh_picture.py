"""A picture of a mesh: one panel an axis, every rank in the colour of its group, hosts framed.

Needs matplotlib (`pip install torch-overlay[plot]`), imported when something is drawn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..distributed._mesh.rank_map import short
from . import canvas
from .mesh_map import Axis, MeshMap
from .words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 4096
MOST_COLORS = 20  # with more groups some colours can't be told apart, and the groups are numbered
_GAP = 0.5  # between hosts, in cells
_TITLE = 0.85  # of a panel, its three or four lines, in inches; as is the next
_WIDEST = 22.0


def draw(mesh: MeshMap, path: str, gpus_per_host: int) -> None:
    """Write the picture; the ending of `path` chooses the format.

    Raises:
        ValueError: more ranks than can be seen.
        ImportError: no matplotlib.
    """
    if len(mesh.ranks) > MOST_RANKS:
        raise ValueError(f"a picture shows at most {MOST_RANKS} ranks, got {len(mesh.ranks)}: draw a smaller mesh")
    pyplot = canvas.pyplot()
    hosts = mesh.hosts(gpus_per_host)
    grid = _Grid(hosts)
    axes = mesh.telling()
    columns = _columns(len(axes), grid)
    rows = math.ceil(len(axes) / columns)
    width = min(_WIDEST, max(7.0, 3.4 * columns, 0.42 * grid.width * columns))
    height = (width / columns * grid.height / grid.width + _TITLE) * rows + 0.9 + 0.19 * len(_notes(mesh))
    with pyplot.rc_context(canvas.STYLE):
        figure, panels = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
        figure.get_layout_engine().set(h_pad=0.12)  # so that the panels' titles keep off the whole's
        cell = 72 * (width - 0.4) / columns / grid.width  # points
        flat = [panel for row in panels for panel in row]
        for panel, axis in zip(flat, axes):
            _panel(panel, axis, grid, gpus_per_host, cell)
        for panel in flat[len(axes) :]:
            panel.axis("off")
        many = f"{counted(len(mesh.ranks), 'rank')} on {counted(len(hosts), 'host')} of {gpus_per_host}"
        figure.suptitle(f"{mesh.title}: {many}", fontweight="bold")
        _legend(figure, mesh)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _columns(panels: int, grid: _Grid) -> int:
    """Panels beside each other, so that the whole is about half as wide again as high and few places stay empty."""

    def unlike(columns: int) -> float:
        rows = math.ceil(panels / columns)
        wide = 0.42 * grid.width * columns / ((0.42 * grid.height + _TITLE) * rows)
        return abs(math.log(wide / 1.5)) + 0.2 * (rows * columns - panels)

    return min(range(1, panels + 1), key=unlike)


def _legend(figure: Any, mesh: MeshMap) -> None:
    """What the colours and frames mean, and what is left out, under the panels."""
    from matplotlib.patches import Patch

    first = min(mesh.ranks)
    marks = [Patch(facecolor=canvas.INK, label=f"rank {first}'s group")]
    marks += [Patch(facecolor=canvas.group_color(1), label="one colour: one group")]
    marks += [Patch(facecolor="white", edgecolor=canvas.INK, label="frame: a host")]
    legend = figure.legend(
        handles=marks,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=10,
        title="\n".join(_notes(mesh)),
        title_fontproperties={"family": "monospace", "size": 9},
    )
    legend.get_title().set_multialignment("left")


def _notes(mesh: MeshMap) -> list[str]:
    """What says nothing as a panel, axes whose groups are the whole world or every rank by itself; and the meshes."""
    lines = []
    for axis in mesh.axes:
        if axis not in mesh.telling():
            what = "every rank by itself" if axis.size == 1 else "one group of all ranks"
            lines.append(f"{what}: {axis.label or axis.name}")
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
    axes.add_collection(canvas.rectangles(frames, ["white"] * len(frames), [canvas.INK] * len(frames), 1.0))
    boxes = [((left + 0.06, top + 0.06), 0.88, 0.88) for left, top in grid.places.values()]
    colors = [canvas.INK if groups[rank] == first else canvas.group_color(groups[rank]) for rank in grid.places]
    axes.add_collection(canvas.rectangles(boxes, colors, ["none"] * len(boxes), 0.0))
    many = len(axis.groups) > MOST_COLORS
    size = min(10.0, cell / (0.75 * len(str(max(groups))) + 0.6))
    numbered = many and size >= 5
    for rank, (left, top) in grid.places.items() if size >= 3 else ():
        color = "white" if groups[rank] == first else canvas.INK
        where: dict[str, Any] = dict(ha="center", va="center", color=color)
        number = axes.text(left + 0.5, top + (0.38 if numbered else 0.54), str(rank), fontsize=size, **where)
        number.set_in_layout(False)  # it lies in its box
        if numbered:
            group = axes.text(left + 0.5, top + 0.75, f"g{groups[rank]}", fontsize=0.7 * size, **where)
            group.set_in_layout(False)
    axes.set_xlim(-0.3, grid.width)
    axes.set_ylim(grid.height, -0.3)
    axes.set_aspect("equal")
    axes.axis("off")
    what = f"{counted(len(axis.groups), 'group')} of {axis.size}, {axis.reach(gpus_per_host)}"
    text = short(axis.groups[first])
    text = text if len(text) < 50 else text[:47] + "..."
    lines = [axis.label or axis.name, what, f"rank {min(groups)}'s group: {text}"]
    if many:
        lines.append("g0, g1, ...: which group" if numbered else "too many for colours: like colours may be two groups")
    axes.set_title("\n".join(lines), fontsize=10)
