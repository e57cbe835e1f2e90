"""Pictures looked at by what is written in them: totals, what is said of nothing, and nothing clipped."""

import pytest

from torch_overlay.__main__ import main
from torch_overlay.show import pictures

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, kept open."""
    pyplot = pictures.pyplot()
    made = []
    monkeypatch.setattr(pyplot, "close", made.append)
    yield made
    monkeypatch.undo()
    for figure in made:
        pyplot.close(figure)


def written(figure):
    """Every text of the figure that is seen, with its box in pixels; ticks of axes that are switched off aren't."""
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    hidden = set()
    for axes in figure.findobj(Axes):
        if not axes.axison:
            hidden.update([*axes.xaxis.findobj(Text), *axes.yaxis.findobj(Text)])
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent()) for text in found if text not in hidden]


def assert_nothing_clipped(figure):
    figure.draw_without_rendering()  # what was saved had another resolution
    size = figure.bbox
    for words, box in written(figure):
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= size.width + 1 and box.y1 <= size.height + 1
        assert inside, f"{words!r} at {box} leaves the picture of {size.width} x {size.height}"


def explained(figures, tmp_path, *arguments):
    """What is written in the picture that the command draws."""
    assert main(["explain", *arguments, f"--out={tmp_path / 'plan.png'}"]) == 0
    (figure,) = figures
    assert_nothing_clipped(figure)
    return [words for words, _ in written(figure)]


def test_totals_that_are_sent_and_received(figures, tmp_path):
    """Each half of the rows is with two ranks, who send one column half of it to one rank each."""
    words = explained(figures, tmp_path, *["--mesh=2,2", "--shape=64,64", "--dtype=uint8", "S0,R", "S1,R"])
    assert "torch_overlay: 1 collective\nthe busiest rank gets 1024 B, sends 1024 B" in words
    assert any(title.endswith("sent in all: 4096 B") for title in words)
    assert words.count("1024") == 4 * 3, "four cells, four senders and four receivers"


@pytest.mark.parametrize("source, what", [("S0,R", "nothing to do"), ("R,R", "1 local step")])
def test_a_plan_that_sends_nothing_shows_the_mesh(source, what, figures, tmp_path):
    words = explained(figures, tmp_path, *f"--mesh=2,4 --shape=64,64 {source} S0,R".split())
    assert f"torch_overlay: {what}, nothing is sent" in words
    assert all(words.count(str(rank)) == 1 for rank in range(8)), "each rank in its place"


@pytest.mark.parametrize("arguments", ["--mesh 2,8,8", "--degrees dp_shard=2,cp=2,tp=2,ep=4 --gpus-per-host 4"])
def test_meshes_fit_their_pictures(arguments, figures, tmp_path):
    assert main(["draw", *arguments.split(), "--out", str(tmp_path / "mesh.png")]) == 0
    assert_nothing_clipped(figures[0])
