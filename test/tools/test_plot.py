"""What the bench draws and prints of a given report: nothing overprinted, nothing cut, one direction of ratios."""

import argparse
import io
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from benchmarks import growth, plans, plot, table  # noqa: E402
from benchmarks.report import Report, Row, Target  # noqa: E402


def overhead(axes):
    """A report as of `overhead --axes ...`; one of them makes bars, several make curves."""
    names = [f"{kind}, {which}" for kind in ("plan hit", "plan miss", "plan first") for which in ("mean", "worst pair")]
    rows = [Row(name, "s", 1e-4 * (axis + 1), 4e-5, {"axes": axis}) for axis in axes for name in names]
    return Report("overhead", "2.13.0+cpu", rows, [Target("plan hit, 1 axes, times faster", 2.5, 1, gain=True)])


@pytest.mark.parametrize("axes", [[1], [1, 2, 3, 4]], ids=["bars", "curves"])
def test_nothing_is_overprinted_or_cut(axes, monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    made = []
    monkeypatch.setattr(pyplot, "close", made.append)
    plot.draw(overhead(axes), str(tmp_path / "found.png"))
    (figure,) = made
    figure.draw_without_rendering()
    boxes = {
        "the figure's title": figure._suptitle.get_window_extent(),
        "legend": figure.legends[0].get_window_extent(),
    }
    for panel in figure.axes:
        if panel.get_visible():
            boxes[panel._left_title.get_text()] = panel._left_title.get_window_extent()
            boxes |= {label.get_text(): label.get_window_extent() for label in panel.texts if label.get_text()}
    for words, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, words
        if words != "legend":
            assert not box.overlaps(boxes["legend"]), words
        if words != "the figure's title":
            assert not box.overlaps(boxes["the figure's title"]), words
    monkeypatch.undo()
    pyplot.close(figure)


@pytest.mark.parametrize("columns", [40, 80, 120, 300])
def test_tables_are_as_wide_as_the_terminal_between_80_and_120(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    found = overhead([1, 2])
    found.targets.append(
        Target("1 MB, worst (2,2,2: S0,S0,S0 -> S1,S1,S1 and a name that is long), times faster", 1, 2, True)
    )
    table.print_report(found)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(80, min(120, columns))
    assert any(line.split()[-4:] == ["2.50x", "at", "least", "1.00x"] or "at least 1.00x" in line for line in lines)


def test_ratios_say_how_many_times_better():
    from rich.console import Console

    text = io.StringIO()
    table.print_report(overhead([1]), Console(file=text, width=100))
    assert "stock   overlay   better" in text.getvalue() and "5.00x" in text.getvalue()


def test_plans_are_counted_and_drawn(tmp_path):
    found = Report("plans", "2.13.0+cpu")
    plans.run(argparse.Namespace(shape=[16, 16], device="cuda", every=40), found)
    moves = found.row("collectives", pairs="18 moves")
    assert moves.overlay == found.facts["moves"]["overlay"]["1"] <= moves.stock
    assert set(found.facts["moves"]["overlay"]) == {"0", "1"} and set(found.facts["reductions"]["overlay"]) <= set(
        "012"
    )
    assert sum(found.facts["moves"]["stock"].values()) == 18 and found.targets[0].met
    pytest.importorskip("matplotlib")
    plot.draw(found, str(tmp_path / "plans.png"))
    assert (tmp_path / "plans.png").stat().st_size > 10_000


def test_a_pair_that_takes_more_is_a_missed_target_and_named(monkeypatch):
    monkeypatch.setattr(plans, "counts", lambda *_: {"stock": (1, 8), "overlay": (2, 8)})
    found = Report("plans", "0")
    plans.run(argparse.Namespace(shape=[16, 16], device="cuda", every=600), found)
    assert not found.targets[0].met and "more collectives: R,R,R -> R,R,S0" in found.notes


def test_growth_holds_first_plans_against_stock_and_counts_pieces(monkeypatch):
    """With times as if they had been measured: rows for each kind of shards and number of ranks, and what is slow."""
    times = {"stock": [1e-3, 1e-3, 2e-3, 9e-3], "overlay": [4e-3, 6e-3, 6e-3, 17e-3]}
    monkeypatch.setattr(growth.process, "fresh", lambda function, side, count: times[side])
    monkeypatch.setattr(growth, "SOURCES", (8, 64))
    monkeypatch.setattr(growth, "MESHES", ((2, 2, 2), (4, 4, 4)))
    found = Report("growth", "0")
    growth.run(argparse.Namespace(pairs=2, processes=2, questions=100), found)
    assert found.row("first redistribution, worst", shards="uneven").overlay == 17e-3
    slow = found.targets[0]
    assert (slow.value, slow.met) == (2, False) and len(found.notes) == 2
    assert found.row("plan of a transfer's target", ranks=64).where["pieces"] == 200 * 64
    assert {row.where["ranks"] for row in found.rows if row.name.startswith("planner alone")} == {8, 64}
