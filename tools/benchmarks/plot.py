"""Draws a report: curves where a row was measured at several sizes, bars where it wasn't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .report import Report, Row
from .sides import OVERLAY, SIDES, STOCK
from .table import shown, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {STOCK: "#8d99ae", OVERLAY: "#e4572e"}
_INK = "#2b2d42"
_STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.color": _INK}


def draw(report: Report, path: str) -> None:
    """Write the picture to `path`, in the format of its ending."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    style = _STYLE | {"axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}
    with pyplot.rc_context(style):
        figure = _plans(report, pyplot) if report.bench == "plans" else _panels(report, pyplot)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _panels(report: Report, pyplot: Any) -> Any:
    """Every row of a report: curves if some were measured at several sizes, else bars."""
    panels = _curves(report) or _bars(report)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    # A panel of bars is as high as its bars need, and no figure is too narrow for its title.
    height = max(3.0, *(0.55 * len(rows) + 1.1 for _, rows, kind in panels if kind is _pairs), 0)
    size = (max(8.0, 4.8 * columns), height * lines + 0.8)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, (title, rows, kind) in zip(grid.flat, panels):
        kind(axes, rows)
        axes.set_title(title, loc="left", fontsize=10)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    title = f"bench {report.bench}: stock torch {report.torch} and the overlay"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=2)
    return figure


def _plans(report: Report, pyplot: Any) -> Any:
    from matplotlib.patches import Patch

    from . import plans

    colors = ["#e3e6ec", "#f4a582", "#8d99ae", "#56627a", _INK]
    figure = pyplot.figure(figsize=(9.6, 5.0), layout="constrained")
    plans.draw(report, figure, colors, _INK)
    figure.suptitle(
        f"Collectives that a redistribution takes: stock torch {report.torch.partition('+')[0]} and the overlay",
        x=0.01,
        ha="left",
        fontweight="bold",
        fontsize=14,
    )
    marks = [Patch(facecolor=color, label=label) for color, label in zip(colors, ("none", "1", "2", "3", "4 and more"))]
    most = max(len(report.facts[kind][side]) for kind in (plans.MOVES, plans.REDUCTIONS) for side in SIDES)
    figure.legend(
        handles=marks[:most],
        loc="outside lower left",
        ncols=len(marks),
        frameon=False,
        fontsize=11,
        title="collectives that a pair of placements takes; " + report.notes[0],
        title_fontsize=9,
        alignment="left",
    )
    return figure


def _curves(report: Report) -> list:
    """(title, rows, how to draw) for each name that was measured at two or more numbers of one key."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        keys = [key for key, value in row.where.items() if isinstance(value, int)]
        if len(keys) == 1 and row.stock and row.overlay:
            place = " ".join(str(value) for value in row.where.values() if isinstance(value, str))
            found.setdefault((f"{row.name} {place}".strip(), keys[0]), []).append(row)
    curves = {name: rows for name, rows in found.items() if len(rows) > 1}
    return [(title, rows, _curve(key, _range(curves, rows[0].unit))) for (title, key), rows in curves.items()]


def _range(curves: dict, unit: str) -> tuple[float, float]:
    """The y axis that all panels of a unit share, so that their heights can be compared."""
    values = [
        value for rows in curves.values() for row in rows if row.unit == unit for value in (row.stock, row.overlay)
    ]
    return min(values) / 2, max(values) * 2


def _curve(key: str, limits: tuple[float, float]):
    def draw_curve(axes: Axes, rows: list[Row]) -> None:
        at = [row.where[key] for row in rows]
        for side in SIDES:
            axes.plot(at, [getattr(row, side) for row in rows], "o-", color=_COLORS[side], label=side, markersize=4)
        if at[-1] > 8 * at[0]:
            axes.set_xscale("log", base=2)
        else:
            axes.set_xticks(at)
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        axes.set_xlabel(key)
        axes.set_ylabel({"s": "seconds", "B": "bytes"}.get(rows[0].unit, rows[0].unit))
        axes.grid(alpha=0.25)
        where = dict(textcoords="offset points", xytext=(0, 6), ha="right", fontsize=9)
        axes.annotate(times(rows[-1].gain), (at[-1], max(rows[-1].stock, rows[-1].overlay)), **where)

    return draw_curve


def _bars(report: Report) -> list:
    """One panel a place and unit: the rows as pairs of bars."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        place = ", ".join(f"{key} {value}" for key, value in row.where.items())
        found.setdefault((place, row.unit), []).append(row)
    return [(place, rows, _pairs) for (place, _), rows in found.items()]


def _pairs(axes: Axes, rows: list[Row]) -> None:
    for index, side in enumerate(SIDES):
        values = [getattr(row, side) for row in rows]
        at = [line + (index - 0.5) * 0.4 for line in range(len(rows))]
        bars = axes.barh(at, [value or 0 for value in values], height=0.38, color=_COLORS[side], label=side)
        labels = ["" if value is None else shown(value, row.unit) for value, row in zip(values, rows)]
        axes.bar_label(bars, labels, padding=3, fontsize=8, color=_INK)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    positive = [value for row in rows for value in (row.stock, row.overlay) if value]
    if positive and max(positive) > 50 * min(positive):
        axes.set_xscale("log")
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.25)
