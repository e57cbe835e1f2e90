"""Draws the pictures of the pages, by the package's own plans and its own style.

python docs/pictures/make_pictures.py [FOLDER]      the folder of this file by default; needs matplotlib
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from torch_overlay.__main__ import main as command
from torch_overlay.show import flow, pictures, typed
from torch_overlay.show.words import size_text

SHAPE, ITEMSIZE = (4096, 4096), 2
SOURCE, TARGET = ("S0,S1", (2, 2), (0, 1, 2, 3)), ("S0", (3,), (4, 5, 6))  # placements, sizes and ranks of a mesh
TITLES = ("the trainer: FSDP=2 x TP=2", "the servers: TP=3")


def draw_transfer(path: pathlib.Path) -> None:
    """Draw one weight as the trainer cuts it and as the servers do, and an arrow for each message between them."""
    ends = [(typed.parse_placements(words, len(sizes)), sizes, ranks) for words, sizes, ranks in (SOURCE, TARGET)]
    sent = flow.of_words(SHAPE, *ends, itemsize=ITEMSIZE).flow.sent
    with pictures.figure(str(path), figsize=(8.6, 3.1)) as whole:
        panels = whole.add_axes((0.02, 0.03, 0.36, 0.84)), whole.add_axes((0.62, 0.03, 0.36, 0.84))
        centers: dict[int, tuple[float, float, float]] = {}  # by rank: left edge, right edge and middle of its box
        for axes, title, (placements, sizes, ranks) in zip(panels, TITLES, ends):
            holders = pictures.holders(typed.regions(placements, SHAPE, sizes))
            boxes = []
            for ((top, left), (height, width)), (position,) in holders.items():
                x, y, w, h = left / SHAPE[1], top / SHAPE[0], width / SHAPE[1], height / SHAPE[0]
                boxes.append(((x, y), w, h))
                centers[ranks[position]] = (x, x + w, y + h / 2)
                axes.text(x + 0.03, y + 0.07, f"rank {ranks[position]}", va="center")
            pictures.fill(axes, boxes, [pictures.group_color(ranks[position]) for (position,) in holders.values()])
            pictures.frame(axes, 1, 1)
            axes.set_title(title, fontweight="bold", fontsize=11)
        arrows = sorted((sender, receiver) for sender, receiver in sent if sender != receiver)
        for sender, receiver in arrows:
            arriving = [first for first, second in arrows if second == receiver]
            _, right, middle = centers[sender]
            left, _, there = centers[receiver]
            there += 0.05 * (arriving.index(sender) - (len(arriving) - 1) / 2)
            _arrow(whole, panels, (right - 0.03, middle), (left, there))
        sizes = sorted({sent[pair] for pair in arrows})
        span = " to ".join(map(size_text, [sizes[0], sizes[-1]]))
        text = f"one weight, 4096 x 4096 bf16\n{len(arrows)} messages of {span}\nin one exchange"
        whole.text(0.5, 0.91, text, ha="center", va="center", fontsize=9)


def _arrow(figure, panels, start: tuple[float, float], end: tuple[float, float]) -> None:
    from matplotlib.patches import ConnectionPatch

    style = dict(arrowstyle="-|>", mutation_scale=11, color=pictures.COLOR_AS_INK, linewidth=1.3)
    figure.add_artist(
        ConnectionPatch(start, end, coordsA="data", coordsB="data", axesA=panels[0], axesB=panels[1], **style)
    )


def make(folder: pathlib.Path) -> None:
    """Write all pictures that this file makes into a folder."""
    draw_transfer(folder / "weights.png")
    command(f"draw --mesh dp=2,cp=2,tp=2 --gpus-per-host 4 --out {folder}/mesh.png".split())
    command(f"draw --degrees dp_shard=2,cp=2,tp=2,ep=4 --gpus-per-host 4 --out {folder}/run_2x2x2.png".split())


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent))
