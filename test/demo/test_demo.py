"""The demo from outside: one command, four panels; what it measures is what it prints; and how it fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_overlay.__main__ import main
from torch_overlay.demo import command, panels
from torch_overlay.show.screen import Screen, Styled

ROOT = Path(__file__).parents[2]


def printed(*arguments: str, folder: Path) -> tuple[str, dict]:
    """(what it printed, its JSON) of one run, started the way a user starts it, in a pipe of 80 columns, and without
    numpy: torch doesn't bring it."""
    hides = folder / "hides"
    hides.mkdir()
    (hides / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    line = [sys.executable, "-m", "torch_overlay", "demo", *arguments, f"--json={folder / 'demo.json'}"]
    path = os.pathsep.join([str(hides), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "demo.json").read_text())


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return printed(folder=tmp_path_factory.mktemp("demo"))


def test_weights_come_both_ways_and_by_fewer_collectives(shown):
    text, found = shown
    weights = found["weights"]
    assert weights["right"] == {"loop": panels.WEIGHTS, "transfer": panels.WEIGHTS}
    assert weights["calls"]["transfer"] <= 4 < panels.WEIGHTS < weights["calls"]["loop"]
    assert weights["mib"]["transfer"] < weights["mib"]["loop"]
    calls = [f"{weights['calls'][way]:,}" for way in ("loop", "transfer")]
    (row,) = (line.split() for line in text.splitlines() if "collectives of a rank" in line)
    assert row[-3:-1] == calls


def test_only_what_changed_is_sent_and_comes_right(shown):
    whole, few = shown[1]["weights"]["changes"]
    assert whole["right"] == few["right"] == panels.WEIGHTS
    assert whole["elements"] == whole["of"] == few["of"] and 0 < few["elements"] <= few["of"] / 95
    assert few["bytes"] < whole["bytes"] / 20
    text = " ".join(shown[0].split())
    assert f"changes {few['elements']:,} of {few['of']:,} elements sends" in text and "All came right." in text


def test_a_killed_server_comes_back_and_nobody_fails(shown):
    found = shown[1]["killed"]
    assert found["killed"]["joined"] == [] and found["killed"]["gone"] == ["two"]
    assert found["killed"]["versions"] == {"one": 2}
    assert found["killed"]["seconds"] < panels.TIMEOUT + 5
    assert found["back"]["joined"] == ["two"] and found["back"]["gone"] == []
    assert found["back"]["versions"] == {"one": 3, "two": 3}
    text = " ".join(shown[0].split())
    assert "joined: two; gone: none. one has version 3, two has version 3." in text


def test_a_hang_explains_itself_and_stock_says_nothing(shown):
    text, found = shown[0], shown[1]["meshes"]
    assert found["stock_waits"] and found["stock_said"] == ""
    said = found["overlay_said"]
    assert "rank 0 builds (dp=2, tp=2)" in said and "ranks 1-3 last came to (dp=4)" in said
    assert 5 <= found["overlay_waited"] <= found["waited"] < panels.PATIENCE
    assert all("ranks 1-3 build (dp=4)" in error for _, error in found["errors"])
    assert "and said nothing" in text and "an error on 4 of 4 ranks" in text


def test_what_stock_gathers_wrong_is_right_under_the_overlay(shown):
    found = {side: {int(length): row for length, row in rows.items()} for side, rows in shown[1]["gathers"].items()}
    assert panels.wrong(found["overlay"]) == []
    assert ("This torch gets all lengths" in shown[0]) == (panels.wrong(found["stock"]) == [])
    assert "overlay  0 1 2" in shown[0] or not panels.wrong(found["stock"])


def test_without_rich_it_prints_plain_lines(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    screen = Screen()
    with screen.progress(4):
        screen.now("starting")
        screen.say(Styled("a line", "bold"))
        screen.advance(2)
    assert capsys.readouterr().out == "  0.0 s  starting\na line\n"


def test_the_next_commands_are_ones_that_work(capsys):
    lines = [re.split("torch.overlay ", line, maxsplit=1)[1].split() for line, _ in command.next_commands()]
    assert [line[0] for line in lines] == ["run", "explain"]
    assert main(lines[0]) == 2
    assert "there is no file 'your_script.py'" in capsys.readouterr().err
    assert main(lines[1]) == 0
    assert "torch_overlay: " in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_refused(capsys):
    assert main(["demo", "--json=no/such/folder.json"]) == 2
    assert "the folder of no/such/folder.json must exist" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(command, "run", panels.gathers)
    assert main(["demo", "--device=cuda"]) == 1
    assert capsys.readouterr().err == "\ndemo: --device cuda needs a GPU, and torch finds none\n"


def test_gloo_that_fails_with_tensors_of_gpus_is_said_in_a_line():
    """As it did on a machine with an H100, on stock, too."""
    raised = (
        "weights: rank 5 failed during 'time'\n  ...\nRuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed"
    )
    said = command.why_not_on_gpus(raised)
    assert said.startswith("--device cuda: ") and said.endswith("Connection closed") and "\n" not in said
    assert command.why_not_on_gpus("weights: rank 5 failed during 'time'\nValueError: wrong") is None
