"""The demo's picture: what both runs learned, and what each needed for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_overlay.demo.result import Result, Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#8d99ae", "#e4572e")
_INK = "#2b2d42"


def draw(result: Result, path: str) -> None:
    """Write the picture to `path` (any format that matplotlib knows by its ending)."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.color": _INK}
    with pyplot.rc_context(style | {"axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}):
        figure, panels = pyplot.subplot_mosaic(
            [["loss", "groups"], ["loss", "collectives"]], figsize=(11, 5.6), width_ratios=[3, 2], layout="constrained"
        )
        _losses(panels["loss"], result)
        _bars(panels["groups"], "Groups", result, _group_counts)
        _bars(panels["collectives"], "Collectives of a step, and of a full save", result, _collective_counts(result))
        config = result.config
        figure.suptitle(
            f"FSDP2 {config.dp_replicate}x{config.dp_shard}, TP {config.tp}, EP {config.ep} "
            f"on {config.ranks} gloo ranks, torch {result.first.torch}",
            fontweight="bold",
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _losses(axes: Axes, result: Result) -> None:
    first, second = result.sides
    steps = range(len(first.losses))
    axes.plot(steps, first.losses, color=_COLORS[0], linewidth=5, alpha=0.6, label=_label(first, result))
    axes.plot(steps, second.losses, color=_COLORS[1], linewidth=1.5, label=_label(second, result))
    difference = result.loss_difference
    same = "the same to the last bit at every step" if difference == 0 else f"largest difference {difference:.2g}"
    axes.set_title(f"Loss: {same}", loc="left", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel("nats a byte")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)


def _bars(axes: Axes, title: str, result: Result, counts: Any) -> None:
    """Two bars for each name that `counts(side)` has, with their numbers on them."""
    names = list(counts(result.first))
    for i, side in enumerate(result.sides):
        values = list(counts(side).values())
        bars = axes.barh([row + (i - 0.5) * 0.4 for row in range(len(names))], values, height=0.38, color=_COLORS[i])
        axes.bar_label(bars, padding=3, fontsize=9, color=_INK)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)


def _group_counts(side: Side) -> dict[str, int]:
    return {"process groups": side.groups, "new_group calls": side.new_group_calls}


def _collective_counts(result: Result) -> Any:
    kinds = sorted(result.first.collectives | result.second.collectives)
    return lambda side: {kind: side.collectives.get(kind, 0) for kind in kinds} | {"full save": side.state_collectives}


def _label(side: Side, result: Result) -> str:
    return f"{side.name} ({side.tokens_per_second(result.config):.0f} tokens/s)"
