"""A picture of an explanation: who holds what before and after, and who sends what to whom in each step.

Needs matplotlib (`pip install torch-overlay[plot]`), imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..distributed._rank_map import short
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
    rows = (explanation.torch, explanation.overlay)
    columns = max(2, *(side.collectives for side in rows))
    with pyplot.rc_context(canvas.STYLE):
        figure = pyplot.figure(figsize=(3.9 * columns + 0.6, 12.4), layout="constrained")
        bands = figure.subfigures(3, 1, height_ratios=[0.9, 1, 1], hspace=0.03)
        _holds(bands[0], explanation)
        for band, side, color in zip(bands[1:], rows, canvas.SIDES):
            _side(band, side, explanation, columns, color)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


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


def _side(figure: Any, side: Side, explanation: Explanation, columns: int, color: str) -> None:
    """One plan: its collectives from left to right, each as a matrix of who sends to whom."""
    steps = [step for step in side.steps if isinstance(step, Collective)]
    figure.suptitle(_headline(side, len(steps)), fontweight="bold", color=color, ha="left", x=0.02)
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for panel in panels[len(steps) :]:
        panel.axis("off")
    lines = [line for line in side.lines if line.axes]
    for number, (panel, step, line) in enumerate(zip(panels, steps, lines), 1):
        matrix = [[n * explanation.question.itemsize for n in row] for row in traffic(step)]
        _matrix(panel, matrix, explanation.question.ranks, color)
        way = " (as if in equal parts)" if isinstance(step, AllReduce) else ""
        panel.set_title(f"{number}. {line.name} over {','.join(line.axes)}{way}\n{line.why}", fontsize=9, wrap=True)


def _headline(side: Side, drawn: int) -> str:
    if side.incoming is None or not side.lines:
        return f"{side.name}: {side.note or 'nothing to do' if not side.lines else 'a plan that it cannot run'}"
    local = len(side.lines) - drawn
    rest = f" ({counted(local, 'local step')} not drawn)" if local else ""
    sent = "" if side.outgoing is None else f", {amount(side.outgoing)} out"
    return f"{side.name}: {counted(drawn, 'collective')}{rest}\n{amount(side.incoming)} in{sent} at the busiest rank"


def _matrix(axes: Axes, matrix: list[list[int]], ranks: tuple[int, ...], color: str) -> None:
    """Bytes from each rank (a row) to each other one (a column), with the sums of both while there is room."""
    most = max(1, max(map(max, matrix)))
    axes.imshow([[cell / most for cell in row] for row in matrix], cmap=canvas.shades(color), vmin=0, vmax=1.25)
    numbered = len(ranks) <= _NUMBERED
    axes.set_ylabel("sender, and what it sends in all" if numbered else _busiest("sender", map(sum, matrix)))
    axes.set_xlabel("receiver, and what it gets in all" if numbered else _busiest("receiver", map(sum, zip(*matrix))))
    every = range(0, len(ranks), max(1, len(ranks) // 16))
    sums = zip(map(sum, matrix), map(sum, zip(*matrix)))
    ports = [(f"{rank}: {_brief(out)}", f"{rank}\n{_brief(in_)}") for rank, (out, in_) in zip(ranks, sums)]
    plain = [(str(rank), str(rank)) for rank in ranks]
    senders, receivers = zip(*((ports if numbered else plain)[i] for i in every))
    axes.set_yticks(every, senders, fontsize=8)
    axes.set_xticks(every, receivers, fontsize=8)
    _rule(axes, len(ranks))
    for row, cells in enumerate(matrix if numbered else []):
        for column, cell in enumerate(cells):
            text = _brief(cell) if cell else "·" if row != column else ""
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5)


def _busiest(port: str, sums: Iterable[int]) -> str:
    """The label of an axis on which there is no room for each rank's sum."""
    return f"{port}, the busiest: {amount(max(sums))}"


def _rule(axes: Axes, size: int) -> None:
    """White lines between the cells, and no frame."""
    axes.tick_params(length=0)
    axes.set_xticks([i - 0.5 for i in range(size)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(size)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _brief(count: int) -> str:
    return amount(count).replace(" ", "").removesuffix("iB").removesuffix("B") if count else "0"
