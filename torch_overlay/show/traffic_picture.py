"""A picture of an explanation: who holds what before and after, and who sends what to whom in each step.

Needs matplotlib (`pip install torch-overlay[plot]`), imported when something is drawn.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from ..distributed._mesh.rank_map import short
from ..distributed.tensor._planner.regions import Regions
from ..distributed.tensor._planner.steps import AllReduce, Collective
from . import canvas
from .explanation import Explanation, Side
from .traffic import holders, traffic
from .words import amount, counted, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 128
_NUMBERED = 16  # more ranks than this, and the bytes don't fit into a cell


def draw(explanation: Explanation, path: str) -> None:
    """Write the picture; the ending of `path` chooses the format.

    Raises:
        ValueError: too many ranks to be read, or no plan that can be drawn.
        ImportError: no matplotlib.
    """
    ask = explanation.question
    ranks = math.prod(ask.sizes)
    if ask.source is None or ask.target is None:
        raise ValueError(f"a picture needs shards that are boxes, but here {ask.refused}")
    if ranks > MOST_RANKS:
        raise ValueError(
            f"a picture shows at most {MOST_RANKS} ranks, got {ranks}: draw a smaller mesh of the same kind"
        )
    pyplot = canvas.pyplot()
    sides = (explanation.torch, explanation.overlay)
    columns = max(2, *(side.collectives for side in sides))
    heights = [3.7, *(_PLAN if _sent(side) else _EMPTY for side in sides)]
    heights[-1] += 0.4 if any(map(_sent, sides)) else 0  # for the legend
    with pyplot.rc_context(canvas.STYLE):
        figure = pyplot.figure(figsize=(4.6 * columns + 0.4, sum(heights)), layout="constrained")
        bands = figure.subfigures(3, 1, height_ratios=heights, hspace=0.03)
        _holds(bands[0], explanation)
        for band, side, color, ink in zip(bands[1:], sides, canvas.SIDES, canvas.SIDE_INKS):
            band.suptitle(_headline(side), fontweight="bold", color=ink, ha="left", x=0.02)
            if _sent(side):
                _plan(band, side, explanation, columns, color)
            else:
                _nothing_sent(band, side, explanation)
        if any(map(_sent, sides)):
            bands[-1].supxlabel(LEGEND, fontsize=9)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


LEGEND = (
    "A cell: the bytes that the rank of its row sends to the rank of its column, the darker the more\n"
    "(K: KiB, M: MiB, G: GiB). Bars: what each rank sends, at the right, and gets, below."
)
_PLAN, _EMPTY = 4.9, 3.1  # inches that a plan takes, and one that sends nothing


def _sent(side: Side) -> list[Collective]:
    return [step for step in side.steps if isinstance(step, Collective)]


def _holds(figure: Any, explanation: Explanation) -> None:
    """The tensor, cut into what the ranks hold: before on the left, after on the right."""
    ask = explanation.question
    assert ask.source is not None and ask.target is not None, "draw() looked"
    shape = "x".join(map(str, ask.shape)) or "scalar"
    mesh = " x ".join(f"{name}={size}" for name, size in zip(ask.names, ask.sizes))
    figure.suptitle(f"{shape} {ask.dtype} on {mesh}: from {ask.words[0]} to {ask.words[1]}", fontweight="bold")
    left, right = figure.subplots(1, 2)
    dims = _shown(ask.source, ask.target)
    for axes, regions, when in ((left, ask.source, "before"), (right, ask.target, "after")):
        _boxes(axes, regions, dims, ask.ranks)
        pending = [ask.names[axis] for axis in sorted(regions.pending)]
        terms = f"\nvalues are terms, to be reduced over {', '.join(pending)}" if pending else ""
        axes.set_title(f"{when}: which ranks hold which part{terms}{_unseen(regions, dims)}", fontsize=10)


def _unseen(regions: Regions, dims: list[int]) -> str:
    """What two dims of the tensor can't show."""
    cut = [str(dim) for dim, order in enumerate(regions.orders) if order and dim not in dims]
    empty = math.prod(regions.sizes) - sum(map(len, holders(regions).values()))
    text = f"\nthese parts are cut along dim {joined(cut)} too, not shown" if cut else ""
    return text + (f"\n{counted(empty, 'rank')} without any" if empty else "")


def _shown(*ends: Regions) -> list[int]:
    """The dims to draw, at most two: those that are cut first."""
    cut = [dim for dim in range(len(ends[0].shape)) if any(end.orders[dim] for end in ends)]
    others = [dim for dim in range(len(ends[0].shape)) if dim not in cut]
    return sorted([*cut, *others][:2])


def _boxes(axes: Axes, regions: Regions, dims: list[int], ranks: tuple[int, ...]) -> None:
    rows, columns = [*(regions.shape[dim] for dim in dims), 1, 1][:2]
    parts: dict[tuple[int, int, int, int], list[int]] = {}
    for (start, length), positions in holders(regions).items():
        top, left = [*(start[dim] for dim in dims), 0, 0][:2]
        height, width = [*(length[dim] for dim in dims), 1, 1][:2]
        parts.setdefault((left, top, width, height), []).extend(ranks[position] for position in positions)
    for (left, top, width, height), held in parts.items():
        color = canvas.group_color(min(held))  # a part has its first holder's colour, before and after
        axes.add_patch(canvas.rectangle((left / columns, top / rows), width / columns, height / rows, color))
        center = ((left + width / 2) / columns, (top + height / 2) / rows)
        text = short(sorted(held))
        if height / rows > 0.04:
            word = "" if len(parts) > 16 else "rank " if len(held) == 1 else "ranks "
            axes.text(*center, word + text, ha="center", va="center", fontsize=9)
    axes.set_xlim(0, 1)
    axes.set_ylim(1, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    for label, which in zip(("set_ylabel", "set_xlabel"), dims):
        getattr(axes, label)(f"dim {which}: {regions.shape[which]}")


def _headline(side: Side) -> str:
    if not side.lines:
        return f"{side.name}: {side.note or 'nothing to do, nothing is sent'}"
    if side.incoming is None or len(side.steps) != len(side.lines):
        return f"{side.name}: a plan that it cannot run"
    drawn = _sent(side)
    local = counted(len(side.lines) - len(drawn), "local step")
    if not drawn:
        return f"{side.name}: {local}, nothing is sent"
    rest = f" ({local} not drawn)" if len(drawn) < len(side.lines) else ""
    out = "" if side.outgoing is None else f", sends {amount(side.outgoing)}"
    return f"{side.name}: {counted(len(drawn), 'collective')}{rest}\nthe busiest rank gets {amount(side.incoming)}{out}"


def _plan(figure: Any, side: Side, explanation: Explanation, columns: int, color: str) -> None:
    """One plan: its collectives from left to right, each as a matrix of who sends to whom."""
    panels = figure.subplots(1, columns, squeeze=False)[0]
    steps = _sent(side)
    for panel in panels[len(steps) :]:
        panel.axis("off")
    for number, (panel, step, line) in enumerate(zip(panels, steps, [line for line in side.lines if line.axes]), 1):
        matrix = [[n * explanation.question.itemsize for n in row] for row in traffic(step)]
        draw_matrix(panel, matrix, explanation.question.ranks, color)
        way = " (as if in equal parts)" if isinstance(step, AllReduce) else ""
        title = f"{number}. {line.name} over {','.join(line.axes)}{way}"
        lines = [title, *textwrap.wrap(line.why, 46), f"sent in all: {amount(sum(map(sum, matrix)))}"]
        panel.set_title("\n".join(lines), fontsize=9)


def _nothing_sent(figure: Any, side: Side, explanation: Explanation) -> None:
    """The mesh: its ranks in their places, in the colours of the parts that they end with."""
    ask = explanation.question
    assert ask.target is not None, "draw() looked"
    words = [f"{line.name}: {line.why}" for line in side.lines] or ["each rank holds what it needs already"]
    across = ask.sizes[-1] if ask.sizes else 1
    color = {place: ask.ranks[held[0]] for held in holders(ask.target).values() for place in held}
    axes = figure.subplots()
    for position, rank in enumerate(ask.ranks):
        row, column = divmod(position, across)
        filled = canvas.group_color(color[position]) if position in color else "white"
        axes.add_patch(canvas.rectangle((column, row), 1, 1, filled))
        if len(ask.ranks) <= 64:
            axes.text(column + 0.5, row + 0.5, str(rank), ha="center", va="center", fontsize=9)
    axes.set_xlim(0, across)
    axes.set_ylim(len(ask.ranks) // across, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    mesh = [f"{name} ({size})" for name, size in zip(ask.names, ask.sizes)] or [""]
    axes.set_xlabel(mesh[-1])
    axes.set_ylabel(" x ".join(mesh[:-1]))
    axes.set_title("\n".join(["the mesh, each rank in the colour of the part that it ends with", *words]), fontsize=9)


def draw_matrix(axes: Axes, matrix: list[list[int]], ranks: tuple[int, ...], color: str) -> None:
    """Bytes from each rank (a row) to each other one (a column), and beside it what each sends and gets in all."""
    most = max(1, max(map(max, matrix)))
    axes.imshow([[cell / most for cell in row] for row in matrix], cmap=canvas.shades(color), vmin=0, vmax=1.25)
    sent, got = [sum(row) for row in matrix], [sum(column) for column in zip(*matrix)]
    numbered = len(ranks) <= _NUMBERED
    every = range(0, len(ranks), 1 if numbered else max(2, len(ranks) // 8))
    axes.set_yticks(every, [str(ranks[i]) for i in every], fontsize=8)
    axes.set_xticks(every, [str(ranks[i]) for i in every], fontsize=8)
    axes.set_ylabel("sender")
    axes.set_xlabel("receiver")
    _totals(axes, sent, got, color, numbered)
    _rule(axes, len(ranks))
    for row, cells in enumerate(matrix if numbered else []):
        for column, cell in enumerate(cells):
            text = _brief(cell) if cell else "·" if row != column else ""
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5)


def _totals(axes: Axes, sent: list[int], got: list[int], color: str, numbered: bool) -> None:
    """Bars at the right for what each rank sends, below for what it gets; with numbers while there is room."""
    size, most = len(sent), max(1, *sent, *got)
    right = axes.inset_axes((1.02, 0, 0.16, 1))
    below = axes.inset_axes((0, -0.34, 1, 0.16))
    right.barh(range(size), sent, height=0.8, color=color, alpha=0.6)
    below.bar(range(size), got, width=0.8, color=color, alpha=0.6)
    for bars, place in ((right, "y"), (below, "x")):
        bars.axis("off")
        getattr(bars, f"set_{place}lim")((size - 0.5, -0.5) if place == "y" else (-0.5, size - 0.5))
        getattr(bars, f"set_{'x' if place == 'y' else 'y'}lim")(0, most)
    below.invert_yaxis()
    for number, (out, in_) in enumerate(zip(sent, got) if numbered else ()):
        right.text(most * 0.06, number, _brief(out), va="center", fontsize=7.5)
        below.text(number, most * 0.08, _brief(in_), ha="center", va="top", fontsize=7.5)
    ends = {"sends": ("", 1.1, -0.03, sent), "gets": (" ", 0.5, -0.36, got)}
    for word, (gap, x, y, sums) in ends.items():
        text = word if numbered else f"{word},{gap or chr(10)}at most{gap or chr(10)}{amount(max(sums))}"
        axes.text(x, y, text, transform=axes.transAxes, ha="center", va="top", fontsize=8)


def _rule(axes: Axes, size: int) -> None:
    """Lines between the cells where they can be seen, and a frame."""
    axes.tick_params(length=0)
    if size <= 32:
        axes.set_xticks([i - 0.5 for i in range(size)], minor=True)
        axes.set_yticks([i - 0.5 for i in range(size)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(size > 32)


def _brief(count: int) -> str:
    return amount(count).replace(" ", "").removesuffix("iB").removesuffix("B") if count else "0"
