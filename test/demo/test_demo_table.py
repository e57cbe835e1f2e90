"""What the demo says of numbers it is given: no processes. And which degrees it chooses, and what it offers next."""

import dataclasses
import io
import shlex

import pytest

from torch_overlay.demo import degrees, table
from torch_overlay.demo.config import Config
from torch_overlay.demo.result import Difference, Result, Side
from torch_overlay.demo.screen import Screen


def result(config=None, second="overlay", weights=None, **of_second):
    """Two runs as on 8 ranks; `of_second` are numbers in which the second differs from them."""
    config = config or Config(steps=12)
    first = Side(
        "stock",
        torch="2.13.0",
        groups=10,
        new_group_calls=33,
        threads=36,
        sockets=42,
        collectives={"all-reduce": 15, "all-gather": 16},
        parameters=20,
        elements=1000,
        state_collectives=34,
        state_seconds=[0.1, 0.11, 0.12],
        losses=[5.0 - i / 10 for i in range(config.steps)],
        step_seconds=[0.2, 0.21, 0.19],
    )
    other = dataclasses.replace(first, name=second, patches=40 if second == "overlay" else 0, **of_second)
    return Result(config, first, other, weights or Difference(1000))


def text(lines):
    return " ".join(" ".join(line for line, _ in lines).split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_it_fits_the_screen_and_uses_it(ranks, flatten, width):
    config = degrees.complete({"ranks": ranks, "flatten": flatten})
    shown = result(config, groups=9, new_group_calls=11, sockets=48, weights=Difference(1000, 7, 1e-7, "w", 2.0))
    pages = (table.header(config, width), table.losses(shown, width), table.summary(shown, width))
    longest = [max(len(line) for line, _ in page) for page in (*pages, table.outcome(shown, width))]
    assert max(longest) <= width and max(longest) > 0.85 * width
    assert max(len(table.progress(shown)), len(table.progress_header(*shown.sides))) <= 80


def test_ratios_say_how_many_times_better_for_costs_and_speeds_alike():
    shown = result(new_group_calls=11, step_seconds=[0.1, 0.11, 0.09], state_seconds=[0.2, 0.22, 0.24])
    rows = {line.rsplit(maxsplit=3)[0]: line.split()[-1] for line, _ in table.summary(shown, 80) if line.endswith("x")}
    assert rows == {"new_group calls of a rank": "3x", "tokens a second": "2x", "time of a full save, ms": "0.5x"}


def test_times_that_are_no_further_apart_than_their_steps_are_called_the_same():
    shown = result(step_seconds=[0.18, 0.2, 0.22])
    assert any(line.split()[-3:] == ["5,120", "5,120", "~same"] for line, _ in table.summary(shown, 80))
    once = result(step_seconds=[0.2])
    assert any(line.split()[-2:] == ["5,120", "-"] for line, _ in table.summary(once, 80))


def test_equal_counts_are_explained_and_the_mesh_call_named():
    words = text(table.summary(result(), 80))
    assert "no group is over just the two" in words
    assert 'mesh["fsdp", "tp"].flatten("fsdp_tp") would make it. With --flatten' in words and "2 fewer" in words
    assert "makes each of the 20 weights whole on every rank" in words
    assert ".flatten(" not in text(table.summary(result(Config(flatten=True, steps=12)), 80))


def test_one_kind_of_collectives_that_differs_gets_a_row():
    lines = [line for line, _ in table.summary(result(collectives={"all-reduce": 13, "all-gather": 16}), 80)]
    assert [line.split() for line in lines if line.startswith("  all")] == [["all-reduce", "15", "13", "1.15x"]]


def test_weights_that_differ_come_with_size_and_reason():
    weights = Difference(1000, 7, 1.2e-7, "head.weight", 4.25)
    words = text(table.outcome(result(weights=weights), 80))
    assert "7 of 1,000 numbers differ, by at most 1.2e-07 (head.weight, where the largest is 4.2)" in words
    assert "Reason: the gradient is clipped by its norm" in words and "--clip 1e9" in words
    one_axis = Config(tp=1, dp_shard=4, ep=1, steps=12)
    assert "please report" in text(table.outcome(result(one_axis, weights=weights), 80))
    assert "please report" in text(table.outcome(result(second="stock again", weights=weights), 80))
    assert "all 1,000 numbers are equal to the last bit" in text(table.outcome(result(), 80))


def test_stock_against_itself_has_nothing_to_explain():
    assert "overlay" not in text(table.summary(result(second="stock again"), 80))


def test_losses_are_listed_once_if_they_are_equal():
    assert text(table.losses(result(), 80)).count("5.0000") == 1
    other = [5.0 - i / 10 for i in range(11)] + [0.0]
    assert text(table.losses(result(losses=other), 80)).count("5.0000") == 2


# --- degrees


@pytest.mark.parametrize("ranks", range(1, 33))
def test_any_number_of_ranks_has_degrees_that_fit(ranks):
    config = degrees.complete({"ranks": ranks})
    assert config.ranks == config.dp_replicate * config.dp_shard * config.tp == ranks
    assert config.tp == (2 if ranks % 2 == 0 else 1)


def test_what_was_chosen_is_said():
    config = degrees.complete({"ranks": 3})
    changed = degrees.changed(config, {"ranks": 3})
    assert changed == {"dp_replicate": 1, "dp_shard": 3, "tp": 1, "ep": 3, "experts": 6, "batch": 18}
    words = text(table.chosen(config, changed, 80))
    assert "To fit 3 ranks: --dp-replicate 1 --dp-shard 3 --tp 1 --ep 3 --experts 6 --batch 18." in words
    assert degrees.changed(degrees.complete({}), {}) == {}


@pytest.mark.parametrize("given", [{"tp": 3}, {"ranks": 5, "tp": 2}, {"heads": 3, "tp": 2}, {"dp_shard": 4, "tp": 4}])
def test_what_is_offered_instead_fits_and_changes_one_number(given):
    with pytest.raises(ValueError, match="must be"):
        degrees.complete(given)
    offered = degrees.fitting(given)
    assert len(offered) == 3
    for one in offered:
        degrees.complete(one)
        assert sum(one.get(name) != given.get(name) for name in one) == 1


# --- what it offers at the end


def test_groups_of_single_ranks_are_the_reason_where_nothing_is_merged():
    three = result(degrees.complete({"ranks": 3, "steps": 12}), groups=10, new_group_calls=40, sockets=60)
    words = text(table.summary(three, 80))
    assert "a group for each axis of one rank" in words and "Each sum is over one axis" in words
    assert "over all axes has" not in words


@pytest.mark.parametrize("config", [Config(), degrees.complete({"ranks": 3})], ids=["8", "3"])
def test_the_next_commands_are_ones_that_work(config, capsys):
    from torch_overlay.__main__ import main

    commands = dict(
        (line.split("torch_overlay", 1)[-1].split("torch-overlay", 1)[-1].split(maxsplit=1))
        for line, _ in table.next_commands(config)
    )
    assert list(commands)[-2:] == ["explain", "run"] and max(map(len, commands.values())) < 60
    assert ("demo" in commands) == config.lacks_groups
    assert main(["explain", *shlex.split(commands["explain"])]) == 0
    assert "overlay: " in capsys.readouterr().out
    assert main(["run", *shlex.split(commands["run"])]) == 2
    assert "there is no file 'your_script.py'" in capsys.readouterr().err


# --- the screen


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_a_bar_from_the_first_moment(monkeypatch):
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    with screen.progress(4):
        screen.now("starting")
        screen.say("a line", "bold")
        screen.advance(2)
    drawn = terminal.getvalue()
    assert screen.width == 100 and "starting" in drawn and "\x1b[1ma line" in drawn and "━" in drawn


@pytest.mark.parametrize("missing", ["terminal", "rich"])
def test_without_a_terminal_or_rich_it_prints_plain_lines(missing, monkeypatch, capsys):
    if missing == "rich":
        monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    screen = Screen()
    with screen.progress(4):
        screen.now("starting")
        screen.now("training", line=False)
        screen.say("a line", "bold")
        screen.advance(2)
    assert capsys.readouterr().out == "  0.0 s  starting\na line\n" and screen.width == 120
