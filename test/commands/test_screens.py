"""Every screen: it fits 80 columns, uses 120, says the same at each width, with colours and without."""

import io
import random
import re
import sys

import pytest

from torch_overlay import report
from torch_overlay.choices import OPTIONAL, Choices
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.parallel_dims import ParallelDims
from torch_overlay.show import screen
from torch_overlay.show.drawing import Drawing, MeshMap, of_degrees
from torch_overlay.show.explanation import Explanation, Redistribution, ShownPlan, ShownStep
from torch_overlay.show.groups import GroupRow, Listing, UniverseRow
from torch_overlay.show.words import fitted, folded

AXES = ("pp", "dp_replicate", "dp_shard_cp", "tp")


def step(name, axes, holds):
    why = "each rank holds a part of what all of them want, and this sentence is longer than a line can be, as some are"
    return ShownStep(
        name, axes, 1024, holds, 123 << 30, 45 << 30, 0.123, why, "torch takes the wrong elements here: " + why
    )


def explanation():
    wide = step("all_reduce(product)", AXES, "P(product)·S0#1·_S1(16)·R")
    steps, note = (wide, step("narrow", (), "R·R·R·R")), "would be " + "1 collective " * 9
    plans = [ShownPlan(f"torch 2.13.0+{name}", steps, note) for name in ("cpu", "overlay")]
    question = Redistribution(
        words=("_StridedShard(0, 16)·" * 4 + "R", "R·R·R·R"),
        shape=(4096,) * 4,
        sizes=(2, 4, 8, 16),
        source=None,
        target=None,
        refused="",
        names=AXES,
        ranks=tuple(random.Random(0).sample(range(1024), 1024)),
        dtype="float8_e4m3fn",
        itemsize=1,
        groups=None,
        cost=Cost(),
    )
    return Explanation(question, *plans)


def status():
    rows = [
        report.RowStatus("torch.distributed.device_mesh:DeviceMesh._compute_coordinate_on_dim", "replaced", "on"),
        report.RowStatus("torch._dynamo.trace_rules:", "hooked", "waiting", "until the module is imported"),
        report.RowStatus(
            "torch.distributed.tensor._redistribute:redistribute_local_tensor",
            "code swapped",
            "left out",
            "a/path/to/_redistribute.py defines redistribute_local_tensor with another body (0123456789abcdef)",
        ),
    ]
    counts = [("redistributions by torch's own code", {f"a reason of several words, number {i}": i for i in range(9)})]
    group = GroupRow((1, 5, *range(7, 400, 9), 500), "dp", ("dp",), False, False)
    listing = Listing((UniverseRow("mesh 1 over ranks 0-1023", (), (group,), (("cp", "ring"),)),))
    return report.Status(True, "2.13.0+cpu", tuple(rows), Choices(leave_out=OPTIONAL), tuple(counts), listing)


class Whole:
    """What `status --all` shows."""

    lines, __str__ = status().all_lines, lambda self: status().all()


SCREENS = {
    "explain": explanation(),
    "status": status(),
    "status --all": Whole(),
    "draw": Drawing(of_degrees(ParallelDims(4, 2, 8, 2, 4, 16, 2).fit(512))),
    "draw of a world": Drawing(of_degrees(ParallelDims(pp=8).fit(8)), 4),
    "draw of large hosts": Drawing(MeshMap.of(AXES, (2, 3, 4, 6), random.Random(0).sample(range(144), 144)), 72),
}


@pytest.mark.parametrize("name", SCREENS)
def test_fits_each_width(name):
    shown = SCREENS[name]
    assert str(shown) == "\n".join(shown.lines(screen.NARROW))
    for width in (screen.NARROW, 93, screen.WIDE):
        lines = shown.lines(width)
        assert max(map(len, lines)) <= width, max(lines, key=len)
        assert all(line == line.rstrip() for line in lines)
    assert max(map(len, shown.lines(screen.WIDE))) > screen.NARROW or name == "draw of a world", "it uses what is there"


@pytest.mark.parametrize("name", ["explain", "status", "status --all"])
def test_says_the_same_at_each_width(name):
    at = {width: "".join(SCREENS[name].lines(width)) for width in (screen.NARROW, screen.WIDE)}
    letters = [sorted(re.sub(r"[^a-z]", "", text)) for text in at.values()]
    assert letters[0] == letters[1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("name", SCREENS)
def test_colours_change_no_letter(name, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")  # rich cuts nothing, even where a terminal is narrower than a line
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = SCREENS[name].lines(screen.NARROW)
    terminal, pipe = Terminal(), io.StringIO()
    screen.show(lines, terminal)
    screen.show(lines, pipe)
    assert "\x1b[" in terminal.getvalue() and "\x1b" not in pipe.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()) == pipe.getvalue() == "\n".join(lines) + "\n"


def test_without_rich_a_terminal_has_plain_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    screen.show(SCREENS["explain"].lines(), terminal)
    assert terminal.getvalue() == f"{SCREENS['explain']}\n"


@pytest.mark.parametrize("columns, wide", [("60", 80), ("100", 100), ("200", 120)])
def test_width_is_the_terminals_within_limits(columns, wide, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert screen.width() == wide
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert screen.width() == 80, "a pipe has no width"


def test_folded_keeps_what_cannot_be_cut():
    rows = [("name", "over"), ("x", "a,bb,ccc"), ("y", "ddddd")]
    assert folded(rows, 9, {1: ","}) == [["name  over"], ["x     a,bb,", "      ccc"], ["y     ddddd"]]
    assert fitted("short", 9) == ["short"]
