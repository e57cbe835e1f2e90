"""Draws plans and flows: which rank holds what, and who sends how much to whom. Also the style of all pictures.

matplotlib (`pip install torch-overlay[plot]`) is imported when something is drawn.
"""

from __future__ import annotations

import colorsys
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..distributed._mesh.text import ranks_text
from ..distributed.tensor._planner.steps import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from .shown_plan import Redistribution, Several, ShownPlan, ShownStep, Side
from .words import amount, brief, counted, joined, sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#2b2d42"
FAINT = "#c9cdd6"
COLOR = "#e4572e"
COLOR_AS_INK = "#c23d17"  # COLOR, dark enough for text
STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
}


def group_color(number: int) -> tuple[float, float, float]:
    """The colour of a group. Successive numbers get unlike colours, all light enough for dark text."""
    hue = number * 0.61803398875 % 1  # steps of the golden ratio: neighbours in number are far apart in hue
    light = (0.80, 0.70, 0.87)[number % 3]
    return colorsys.hls_to_rgb(hue, light, 0.65)


@contextmanager
def figure(path: str, **arguments: Any) -> Iterator[Any]:
    """An empty figure, written to `path` unless the block raises. It needs no display, and leaves pyplot alone."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a picture needs matplotlib: pip install 'torch-overlay[plot]'") from None
    with matplotlib.rc_context(STYLE):
        new_figure = Figure(**arguments)
        yield new_figure
        new_figure.savefig(path, dpi=130)


def fill(
    axes: Axes,
    boxes: Sequence[tuple[tuple[float, float], float, float]],
    colors: Sequence[Any],
    rims: str = "white",
    width: float = 2.0,
) -> None:
    """Draw filled boxes with a rim, as one collection: one patch for each would be slow."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches = [Rectangle(*box) for box in boxes]
    axes.add_collection(PatchCollection(patches, facecolors=colors, edgecolors=rims, linewidths=width))


def frame(axes: Axes, width: float, height: float) -> None:
    """Set the limits of the axes, without ticks, and with rows from the top down."""
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])


def shades(color: str) -> Any:
    """A colour map from almost white to a colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#f4f5f7", color])


# --- who sends how many elements to whom ---


def coordinates(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every coordinate of a mesh, row-major."""
    return list(itertools.product(*map(range, sizes)))


def traffic(step: Collective) -> list[list[int]]:
    """The elements that each position sends to each other one; an all-reduce as a reduce-scatter and an all-gather."""
    all_coordinates = coordinates(step.before.sizes)
    positions = {coordinate: position for position, coordinate in enumerate(all_coordinates)}
    sent = [[0] * len(positions) for _ in positions]
    for coordinate, position in positions.items():
        members = [positions[member] for member in step.members(coordinate)]
        for member, elements in _parts(step, coordinate):
            peer = members[member]
            if peer == position:
                continue
            if isinstance(step, AllGather):
                sent[peer][position] += elements
            else:
                sent[position][peer] += elements
    return sent


def _parts(step: Collective, coordinate: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs (member, elements): what a rank gets from the member in an all-gather, else what it sends there."""
    if isinstance(step, AllReduce):
        return [(member, -(-2 * step.before.most // step.ranks)) for member in range(step.ranks)]
    if isinstance(step, AllToAll):
        return [(piece.member, piece.box.elements) for piece in step.sends(coordinate)]
    assert isinstance(step, (AllGather, ReduceScatter)), step
    return [(piece.member, piece.box.elements) for piece in step.pieces(coordinate)]


def holders(regions: Side) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]:
    """By box that holds elements, as (start, length), the positions of the mesh (row-major) that hold it."""
    positions_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for position, coordinate in enumerate(coordinates(regions.sizes)):
        for box in regions.boxes(coordinate) if isinstance(regions, Several) else [regions.box(coordinate)]:
            if box.elements:
                positions_of.setdefault((box.start, box.length), []).append(position)
    return positions_of


# --- the pictures ---

MOST_RANKS = 128
_NUMBERED = 16  # more ranks than this, and the bytes don't fit into a cell
LEGEND = (
    "A cell: the bytes that the rank of its row sends to the rank of its column, the darker the more\n"
    "(K: KiB, M: MiB, G: GiB). Bars: what each rank sends, at the right, and gets, below."
)
_PLAN, _EMPTY = 5.3, 3.1  # the height of a plan in inches, and of one that sends nothing


def draw_plan(ask: Redistribution, plan: ShownPlan, path: str) -> None:
    before, after = ask.sides
    # Of some strided shards that are cut unevenly, the placements don't tell who holds what.
    if before is None or after is None:
        raise ValueError(f"a picture needs shards of which each rank's part is known, but here {ask.refused}")
    _check_count(math.prod(ask.sizes))
    columns, sends = max(2, plan.collectives), bool(_collectives(plan))
    heights = [3.7, _PLAN if sends else _EMPTY]
    with figure(path, figsize=(4.6 * columns + 0.4, sum(heights)), layout="constrained") as whole:
        above, band = whole.subfigures(2, 1, height_ratios=heights, hspace=0.03)
        _holds(above, ask, before, after)
        band.suptitle(_headline(plan), fontweight="bold", color=COLOR_AS_INK, ha="left", x=0.02)
        if sends:
            _plan(band, plan, ask, columns)
            band.supxlabel(LEGEND, fontsize=9)
        else:
            _nothing_sent(band, plan, ask, after)


def draw_flow(
    ranks: tuple[int, ...],
    sent: Mapping[tuple[int, int], int],
    lines: Sequence[str],
    path: str,
    hosts: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Draw a matrix of who sends how much to whom, under the first of `lines`; dark lines part the hosts."""
    _check_count(len(ranks))
    moved = [pair for pair, size in sent.items() if size] or [*itertools.product(ranks, ranks)]
    senders, receivers = (sorted({pair[side] for pair in moved}) for side in (0, 1))
    matrix = [[sent.get((sender, receiver), 0) for receiver in receivers] for sender in senders]
    head = [*itertools.takewhile(bool, lines)]
    # In inches, and not laid out by matplotlib: its layouts leave room for a square.
    cell = min(0.6, 7 / max(len(senders), len(receivers)))
    across, down, bars = cell * len(receivers), cell * len(senders), cell * _bar(len(senders), len(receivers))
    width, height = max(6.8, 1.7 + across + bars), 1.8 + 0.18 * len(head) + down + bars
    with figure(path, figsize=(width, height)) as whole:
        whole.text(0.5, 1 - 0.1 / height, "\n".join(head), fontweight="bold", ha="center", va="top")
        left = (width - across - bars) / 2
        place = left / width, (0.9 + bars) / height, across / width, down / height
        axes = whole.add_axes(place)
        _matrix(axes, matrix, senders, receivers)
        for line, side in ((axes.axhline, senders), (axes.axvline, receivers)):
            for before, (one, other) in enumerate(itertools.pairwise(side)):
                if hosts.get(one) != hosts.get(other):
                    line(before + 0.5, color=INK, linewidth=1.5)
        legend = f"{LEGEND} Dark lines part hosts." if len({hosts.get(rank) for rank in ranks}) > 1 else LEGEND
        whole.text(0.5, 0.1 / height, legend, fontsize=9, ha="center", va="bottom")


def _check_count(ranks: int) -> None:
    if ranks > MOST_RANKS:
        raise ValueError(
            f"a picture shows at most {MOST_RANKS} ranks, got {ranks}: draw a smaller mesh of the same kind"
        )


def _collectives(plan: ShownPlan) -> list[ShownStep]:
    return [line for line in plan.lines if line.axes]


def _holds(figure: Any, ask: Redistribution, before: Side, after: Side) -> None:
    """Draw the tensor with the parts that ranks hold, before on the left and after on the right."""
    mesh = sized(ask.names, ask.sizes)
    figure.suptitle(f"{ask.tensor} on {mesh}: from {ask.words[0]} to {ask.words[1]}", fontweight="bold")
    left, right = figure.subplots(1, 2)
    dims = _shown(before, after)  # the same two for both sides, so that they can be compared
    for axes, regions, when in ((left, before, "before"), (right, after, "after")):
        _boxes(axes, regions, dims, ask.ranks)
        pending = [ask.names[axis] for axis in sorted(regions.pending)]
        terms = f"\nvalues are terms, to be reduced over {', '.join(pending)}" if pending else ""
        axes.set_title(f"{when}: which ranks hold which part{terms}{_unseen(regions, dims)}", fontsize=10)


def _unseen(regions: Side, dims: list[int]) -> str:
    """Lines that say what a drawing of these dims doesn't show, each after a line break; empty if it shows all."""
    cut = [str(dim) for dim, order in enumerate(regions.orders) if order and dim not in dims]
    empty = math.prod(regions.sizes) - len({*itertools.chain(*holders(regions).values())})
    text = f"\nthese parts are cut along dim {joined(cut)} too, not shown" if cut else ""
    return text + (f"\n{counted(empty, 'rank')} without any" if empty else "")


def _shown(*ends: Side) -> list[int]:
    """The dims to draw, at most two. Dims that are sharded come first."""
    cut = [dim for dim in range(len(ends[0].shape)) if any(end.orders[dim] for end in ends)]
    others = [dim for dim in range(len(ends[0].shape)) if dim not in cut]
    return sorted([*cut, *others][:2])


def _boxes(axes: Axes, regions: Side, dims: list[int], ranks: tuple[int, ...]) -> None:
    """Draw the tensor as a rectangle, cut into the boxes that ranks hold, with their numbers."""
    rows, columns = [*(regions.shape[dim] for dim in dims), 1, 1][:2]
    parts: dict[tuple[int, int, int, int], list[int]] = {}
    for (start, length), positions in holders(regions).items():
        top, left = [*(start[dim] for dim in dims), 0, 0][:2]
        height, width = [*(length[dim] for dim in dims), 1, 1][:2]
        parts.setdefault((left, top, width, height), []).extend(ranks[position] for position in positions)
    # Replicas hold one box, which has the colour of the first of them.
    colors = [group_color(min(owners)) for owners in parts.values()]  # a rank has one colour, before and after
    boxes = [((x / columns, y / rows), width / columns, height / rows) for x, y, width, height in parts]
    fill(axes, boxes, colors)
    for (left, top, width, height), owners in parts.items():
        center = ((left + width / 2) / columns, (top + height / 2) / rows)
        text = ranks_text(sorted(owners))
        if height / rows > 0.04:
            word = "" if len(parts) > 16 else "rank " if len(owners) == 1 else "ranks "
            axes.text(*center, word + text, ha="center", va="center", fontsize=9)
    frame(axes, 1, 1)
    axes.set(**{label: f"dim {dim}: {regions.shape[dim]}" for label, dim in zip(("ylabel", "xlabel"), dims)})


def _headline(plan: ShownPlan) -> str:
    """The title of a drawn plan: how many collectives, and what the busiest rank sends and gets."""
    if not plan.lines:
        return textwrap.fill(f"torch_overlay: {plan.note or 'nothing to do, nothing is sent'}", 80)
    drawn = _collectives(plan)
    local = counted(len(plan.lines) - len(drawn), "local step")
    if not drawn:
        return f"torch_overlay: {local}, nothing is sent"
    rest = f" ({local} not drawn)" if len(drawn) < len(plan.lines) else ""
    busiest = f"the busiest rank gets {amount(plan.incoming)}, sends {amount(plan.outgoing)}"
    return f"torch_overlay: {counted(len(drawn), 'collective')}{rest}\n{busiest}"


def _plan(figure: Any, plan: ShownPlan, ask: Redistribution, columns: int) -> None:
    """Draw the collectives of a plan from left to right, each as a matrix of who sends how much to whom."""
    panels = figure.subplots(1, columns, squeeze=False)[0]
    drawn = _collectives(plan)
    for panel in panels[len(drawn) :]:
        panel.axis("off")
    for number, (panel, line) in enumerate(zip(panels, drawn), 1):
        assert isinstance(line.step, Collective), line
        matrix = [[n * ask.itemsize for n in row] for row in traffic(line.step)]
        _matrix(panel, matrix, ask.ranks, ask.ranks)
        way = " (as if in equal parts)" if isinstance(line.step, AllReduce) else ""
        title = f"{number}. {line.name} over {','.join(line.axes)}{way}"
        lines = [title, *textwrap.wrap(line.why, 46), f"sent in all: {amount(sum(map(sum, matrix)))}"]
        panel.set_title("\n".join(lines), fontsize=9)


def _nothing_sent(figure: Any, plan: ShownPlan, ask: Redistribution, after: Side) -> None:
    """Draw the mesh, with each rank in the colour of the part that it holds after."""
    steps = [f"{line.name}: {line.why}" for line in plan.lines]
    if not steps and not ask.refused:
        steps = ["each rank holds what it needs already"]
    across = ask.sizes[-1] if ask.sizes else 1
    parts = holders(after).values()
    color = {position: group_color(ask.ranks[owners[0]]) for owners in parts for position in owners}
    places = [(position % across, position // across) for position in range(len(ask.ranks))]
    axes = figure.subplots()
    fill(axes, [(place, 1, 1) for place in places], [color.get(position, "white") for position in range(len(places))])
    # With more ranks their numbers would be too small to read.
    for rank, (column, row) in zip(ask.ranks, places) if len(places) <= 64 else ():
        axes.text(column + 0.5, row + 0.5, str(rank), ha="center", va="center", fontsize=9)
    frame(axes, across, len(ask.ranks) // across)
    mesh = [f"{name} ({size})" for name, size in zip(ask.names, ask.sizes)] or [""]
    axes.set_xlabel(mesh[-1])
    axes.set_ylabel(" x ".join(mesh[:-1]))
    axes.set_title("\n".join(["the mesh, each rank in the colour of the part that it ends with", *steps]), fontsize=9)


def _matrix(axes: Axes, matrix: list[list[int]], senders: Sequence[int], receivers: Sequence[int]) -> None:
    """Draw the bytes that each sender (a row) sends to each receiver (a column), and the sums beside the matrix."""
    # The darkest cell is at four fifths of the scale, so that its dark text can be read.
    axes.imshow(matrix, cmap=shades(COLOR), vmin=0, vmax=1.25 * max(1, *map(max, matrix)))
    numbered = max(len(senders), len(receivers)) <= _NUMBERED
    for set_ticks, ranks in ((axes.set_xticks, receivers), (axes.set_yticks, senders)):
        labelled = range(0, len(ranks), 1 if numbered else max(2, len(ranks) // 8))
        set_ticks(labelled, [str(ranks[i]) for i in labelled], fontsize=8)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set(xlabel="receiver", ylabel="sender")
    _totals(axes, [sum(row) for row in matrix], [sum(column) for column in zip(*matrix)], numbered)
    _rule(axes, len(senders), len(receivers))
    for row, cells in enumerate(matrix if numbered else []):
        for column, cell in enumerate(cells):
            text = brief(cell) if cell else "·" if senders[row] != receivers[column] else ""
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5)


def _bar(rows: int, columns: int) -> float:
    """The length of the longest bar beside a matrix, in cells."""
    return max(1.5, 0.16 * max(rows, columns))


def _totals(axes: Axes, sent: list[int], got: list[int], numbered: bool) -> None:
    """Draw bars with their numbers: at the right what each sender sends, below what each receiver gets."""
    rows, columns, most = len(sent), len(got), max(1, *sent, *got)
    length, gap = _bar(rows, columns), 0.15
    right = axes.inset_axes((1 + gap / columns, 0, length / columns, 1))
    below = axes.inset_axes((0, -(gap + length) / rows, 1, length / rows))
    right.barh(range(rows), sent, height=0.8, color=COLOR, alpha=0.6)
    below.bar(range(columns), got, width=0.8, color=COLOR, alpha=0.6)
    right.set(xlim=(0, most), ylim=(rows - 0.5, -0.5))
    below.set(xlim=(-0.5, columns - 0.5), ylim=(most, 0))
    for number, size in enumerate(sent if numbered else ()):
        right.text(size + most * 0.04, number, brief(size), va="center", fontsize=7.5)
    for number, size in enumerate(got if numbered else ()):
        below.text(number, size + most * 0.04, brief(size), ha="center", va="top", fontsize=7.5)
    for bars, word, sums, x, y in ((right, "sends", sent, 0, 1.01), (below, "gets", got, -0.02, 0.5)):
        bars.axis("off")
        text = word if numbered else f"{word},\nat most\n{amount(max(sums))}"
        ha, va = ("left", "bottom") if bars is right else ("right", "center")
        bars.text(x, y, text, transform=bars.transAxes, ha=ha, va=va, fontsize=8)


def _rule(axes: Axes, rows: int, columns: int) -> None:
    """Draw white lines between the cells of a matrix; a frame above 32 cells, which lines would cover."""
    axes.tick_params(length=0)
    if few := max(rows, columns) <= 32:
        axes.set_xticks([i - 0.5 for i in range(columns)], minor=True)
        axes.set_yticks([i - 0.5 for i in range(rows)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(not few)
