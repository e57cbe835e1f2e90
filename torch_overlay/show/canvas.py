"""What the pictures share: matplotlib, its style and colours."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

INK = "#2b2d42"
FAINT = "#c9cdd6"
SIDES = ("#8d99ae", "#e4572e")  # torch, the overlay
SIDE_INKS = ("#56627a", "#c23d17")  # the same, dark enough to be read as text
STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
}


def pyplot() -> Any:
    """matplotlib's pyplot, with no display needed. Raises ImportError that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("a picture needs matplotlib: pip install 'torch-overlay[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def group_color(number: int) -> tuple[float, float, float]:
    """A light colour, neighbours far apart: dark text reads on each."""
    hue = number * 0.61803398875 % 1
    light = (0.80, 0.70, 0.87)[number % 3]
    return colorsys.hls_to_rgb(hue, light, 0.65)


def rectangle(corner: tuple[float, float], width: float, height: float, color: Any) -> Any:
    """A filled box with a white rim."""
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=color, edgecolor="white", linewidth=2)


def rectangles(
    boxes: Sequence[tuple[tuple[float, float], float, float]], fills: Sequence[Any], rims: Sequence[Any], width: float
) -> Any:
    """Many boxes (corner, width, height) as one thing, which is drawn faster than each of its own."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    return PatchCollection([Rectangle(*box) for box in boxes], facecolors=fills, edgecolors=rims, linewidths=width)


def shades(color: str) -> Any:
    """From almost white to a colour, by amount."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#f4f5f7", color])
