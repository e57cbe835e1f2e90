"""A picture of a flow: a matrix of who sends how much to whom. Needs matplotlib, imported when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import canvas
from .traffic_picture import LEGEND, MOST_RANKS, draw_matrix

if TYPE_CHECKING:
    from .flow import FlowExplanation


def draw(explained: FlowExplanation, path: str) -> None:
    """Write the picture; the ending of `path` chooses the format.

    Raises:
        ValueError: too many ranks to be read.
        ImportError: no matplotlib.
    """
    ranks = explained.ranks
    if len(ranks) > MOST_RANKS:
        raise ValueError(
            f"a picture shows at most {MOST_RANKS} ranks, got {len(ranks)}: draw a smaller mesh of the same kind"
        )
    pyplot = canvas.pyplot()
    matrix = [[explained.flow.sent[sender, receiver] for receiver in ranks] for sender in ranks]
    with pyplot.rc_context(canvas.STYLE):
        figure = pyplot.figure(figsize=(8, 8.6))
        lines = explained.lines()
        head = lines[: lines.index("") if "" in lines else len(lines)]
        figure.text(0.5, 0.98, "\n".join(head), fontweight="bold", ha="center", va="top")
        draw_matrix(figure.add_axes((0.15, 0.32, 0.58, 0.54)), matrix, ranks, canvas.SIDES[1])
        figure.text(0.5, 0.015, LEGEND, fontsize=9, ha="center", va="bottom")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
