"""Pictures looked at by what is written in them: totals, legends, what is said of nothing, and nothing clipped."""

import pytest

from torch_overlay.__main__ import main
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.show import asked, pictures, typed
from torch_overlay.show.explanation import groups_at_hand

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


def explained(figures, tmp_path, sizes, source, target):
    """What is written in the picture of a redistribution of 64x64 bytes."""
    import torch

    mesh, shape = typed.Mesh(sizes, ("a", "b")), (64, 64)
    ends = [typed.placements(text, 2) for text in (source, target)]
    held, groups, cost = typed.held(ends, shape, sizes), groups_at_hand("whole", sizes, []), Cost()
    asked.of_words(ends, held, shape, torch.uint8, mesh, "cuda", [], groups, cost).save(str(tmp_path / "plans.png"))
    (figure,) = figures
    assert_nothing_clipped(figure)
    return [words for words, _ in written(figure)]


def test_totals_that_are_sent_and_received(figures, tmp_path):
    """Each half of the rows is with two ranks, who send one column half of it to one rank each."""
    words = explained(figures, tmp_path, (2, 2), "S0,R", "S1,R")
    assert "torch_overlay: 1 collective\nthe busiest rank gets 1024 B, sends 1024 B" in words
    assert any(title.endswith("sent in all: 4096 B") for title in words)
    assert {"sends", "gets"} <= set(words) and any(word.startswith("A cell: the bytes") for word in words)
    assert words.count("1024") == 4 * 2 * 3, "four cells, four senders and four receivers in both plans"


def test_totals_of_more_ranks_than_have_room_are_the_largest(figures, tmp_path):
    words = explained(figures, tmp_path, (8, 8), "S0,S1", "S1,S0")
    assert "gets, at most 64 B" in words and "sends,\nat most\n64 B" in words
    assert any(title.endswith("sent in all: 3584 B") for title in words)


@pytest.mark.parametrize(
    "source, said", [("S0,R", "nothing to do, nothing is sent"), ("R,R", "1 local step, nothing is sent")]
)
def test_a_plan_that_sends_nothing_shows_the_mesh(source, said, figures, tmp_path):
    words = explained(figures, tmp_path, (2, 4), source, "S0,R")
    assert f"torch_overlay: {said}" in words
    assert all(words.count(str(rank)) == 2 for rank in range(8)), "each rank in its place, in both bands"
    assert words.count("a (2)") == words.count("b (4)") == 2
    assert not any(word.startswith("A cell") for word in words)


MESHES = [
    "--mesh 2,2,2",
    "--mesh 4,16",
    "--mesh 2,8,8",
    "--degrees dp_shard=2,cp=2,tp=2,ep=4 --gpus-per-host 4",
]


@pytest.mark.parametrize("arguments", MESHES)
def test_meshes_fit_their_pictures_and_have_a_legend(arguments, figures, tmp_path):
    assert main(["draw", *arguments.split(), "--out", str(tmp_path / "mesh.png")]) == 0
    (figure,) = figures
    assert_nothing_clipped(figure)
    found = dict(written(figure))
    legend = ("rank 0's group", "one colour: one group", "frame: a host")
    notes = [box for words, box in found.items() if "dense   pp=1" in words]
    assert len(notes) == ("--degrees" in arguments)
    for words in legend:
        assert not any(found[words].overlaps(box) for box in notes)


def test_groups_that_colours_cannot_tell_apart_are_numbered_or_said(figures, tmp_path):
    main(["draw", "--mesh=2,8,8", "--out", str(tmp_path / "mesh.png")])
    words = [text for text, _ in written(figures[0])]
    assert words.count("g63") == 2 and words.count("g1") == 2, "64 groups of 2 on the first axis; the others have 16"
    main(["draw", "--mesh=4,32,8", "--out", str(tmp_path / "large.png")])
    words = [text for text, _ in written(figures[1])]
    assert sum("too many for colours: like colours may be two groups" in text for text in words) == 3
    assert not any(text.startswith("g1") for text in words)


def test_colours_of_as_many_groups_as_go_unnumbered_are_apart():
    import itertools

    from torch_overlay.show.drawing import MOST_COLORS

    pairs = itertools.combinations(map(pictures.group_color, range(MOST_COLORS)), 2)
    assert min(max(abs(a - b) for a, b in zip(one, other)) for one, other in pairs) > 0.05
