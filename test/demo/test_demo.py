"""The demo from outside: one command, two runs, a table; and what it says and leaves behind when something fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torch_overlay.demo.command import main
from torch_overlay.demo.config import Config
from torch_overlay.demo.result import Side
from torch_overlay.demo.rows import times_better
from torch_overlay.demo.text import Text
from torch_overlay.demo.worlds import WorkerError, World

ROOT = Path(__file__).parents[2]
SMALL = ["--steps=6", "--seq=16", "--batch=8", "--width=16", "--text-bytes=50000"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[str, dict, Path]:
    """(what it printed, its JSON, its picture) of one small run on 4 ranks, started the way a user starts it."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "torch_overlay", "demo", "--ranks=4", *SMALL]
    command += [f"--json={folder / 'demo.json'}", f"--out={folder / 'demo.png'}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["COLUMNS"] = "80"
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "demo.json").read_text()), folder / "demo.png"


def test_losses_are_equal_but_for_rounding(outcome):
    stock, overlay = outcome[1]["sides"]["stock"], outcome[1]["sides"]["overlay"]
    assert len(stock["losses"]) == 6
    assert stock["losses"] == pytest.approx(overlay["losses"], abs=1e-6)
    assert outcome[1]["loss_difference"] == max(abs(a - b) for a, b in zip(stock["losses"], overlay["losses"]))


def test_model_learns(outcome):
    losses = outcome[1]["sides"]["stock"]["losses"]
    assert losses[-1] < losses[0] - 0.2


def test_overlay_has_one_group_a_lane(outcome):
    """4 ranks: the world, batch, loss, fsdp, efsdp, tp, ep, and one for the whole; stock has tp twice and no whole."""
    stock, overlay = outcome[1]["sides"]["stock"], outcome[1]["sides"]["overlay"]
    assert (stock["groups"], overlay["groups"]) == (8, 8)
    assert overlay["new_group_calls"] < stock["new_group_calls"]


def test_collectives_are_counted(outcome):
    stock, overlay = outcome[1]["sides"]["stock"], outcome[1]["sides"]["overlay"]
    # Tokens go to the experts and back, forward and backward, after one exchange of how many.
    assert stock["collectives"]["all-to-all"] == 5
    # The norms of dense weights and of experts: stock reduces each over fsdp, then over tp.
    assert overlay["collectives"] == stock["collectives"] | {"all-reduce": stock["collectives"]["all-reduce"] - 2}


def test_the_weights_of_a_mesh_are_made_whole_together(outcome):
    """Dense weights over both axes and over fsdp alone, and experts."""
    stock, overlay = outcome[1]["sides"]["stock"], outcome[1]["sides"]["overlay"]
    assert overlay["state_collectives"] == 3 < overlay["parameters"] <= stock["state_collectives"]


def test_it_prints_progress_and_a_table(outcome):
    printed, numbers, _ = outcome
    lines = printed.splitlines()
    steps = [line.split()[0] for line in lines if "/6 " in line]
    assert steps[0] == "2/6" and steps[-1] == "5/6"
    stock, overlay = numbers["sides"]["stock"], numbers["sides"]["overlay"]
    row = next(line for line in lines if line.startswith("new_group calls of a rank")).split()
    gain = times_better(stock["new_group_calls"], overlay["new_group_calls"])
    assert row[-3:] == [str(stock["new_group_calls"]), str(overlay["new_group_calls"]), gain] and gain != "same"


def test_a_pipe_gets_lines_from_the_start_and_none_is_wider_than_80(outcome):
    lines = outcome[0].splitlines()
    begun = next(line for line in lines if "starting 8 processes" in line)
    assert begun.startswith("  0.") and "\x1b" not in outcome[0]
    assert max(map(len, lines[:-2])) <= 80, "but for the paths of what is written"


def test_weights_are_compared_number_by_number(outcome):
    """The norms' roots may make the last bit differ: no more, and the reason is said."""
    weights, printed = outcome[1]["weights"], " ".join(outcome[0].split())
    assert weights["elements"] == outcome[1]["sides"]["stock"]["elements"] > 10_000
    assert weights["largest"] <= 1e-5 and outcome[1]["same_weights"] == (weights["different"] == 0)
    assert ("numbers are equal to the last bit" in printed) == outcome[1]["same_weights"]
    assert ("numbers differ, by at most" in printed) == ("Reason: " in printed) == (not outcome[1]["same_weights"])


def test_it_draws_a_picture(outcome):
    assert outcome[2].read_bytes().startswith(b"\x89PNG")


def test_worker_that_dies_ends_the_run():
    config = Config(ranks=2, dp_replicate=1, dp_shard=1, timeout=60)
    with pytest.raises(WorkerError, match=r"stock: rank 1 ended \(exit code -9\) during 'ready'"):
        with World("stock", config, overlay=False) as world:
            processes = list(world.processes)
            os.kill(processes[1].pid, signal.SIGKILL)
            world.ask("ready")
    assert [process.is_alive() for process in processes] == [False, False]


def test_worker_that_raises_ends_the_run():
    config = Config(ranks=2, dp_replicate=1, dp_shard=1, timeout=60)
    with pytest.raises(
        WorkerError, match=r"(?s)rank 0 failed during 'build'.*call torch.distributed.init_process_group first"
    ):
        with World("stock", config, overlay=False) as world:
            world.ask("build", ranks=range(1))  # before it has joined a world


def test_worker_that_is_late_ends_the_command(capsys):
    assert main(["--ranks=2", "--timeout=0.001", *SMALL]) == 1
    assert "no answer to 'ready' in 0.001 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message, fits",
    [
        (
            ["--tp=3"],
            "dp_replicate * dp_shard * tp must be the number of ranks, got 1 * 2 * 3 = 6 for 8 ranks",
            "--tp 4; --tp 2; --ranks 9 --tp 3",
        ),
        (["--ep=3"], "dp_shard * tp must be a multiple of ep, got 4 and 3", "--ep 4; --ep 2; --ranks 9 --ep 3"),
        (["--experts=3"], "experts must be a multiple of ep, got 3 and 2", "--experts 4; --experts 2"),
        (["--batch=6"], "batch must be a multiple of dp_replicate * dp_shard, got 6 and 4", "--batch 8; --batch 4"),
        (["--ranks=0"], "ranks must be at least 1, got 0", "--ranks 1"),
        (["--steps=3"], "steps must be at least warmup + 2", "--steps 4"),
        (["--json=no/such/folder.json"], "the folder of no/such/folder.json must exist", ""),
        (["--top-k=5"], "top_k must be between 1 and experts (4), got 5", "--top-k 4"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message, fits, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and (f"these fit: {fits}" in error if fits else "these fit" not in error)


def test_picture_without_matplotlib_is_refused_before_it_runs(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--out=demo.png"]) == 2
    assert "--out needs matplotlib" in capsys.readouterr().err


def test_ranks_that_disagree_on_the_loss_are_an_error():
    with pytest.raises(RuntimeError, match=r"overlay: ranks disagree on the loss of step 0: \[1.0, 2.0\]"):
        Side("overlay").add_loss([1.0, 2.0])


def test_text_is_the_same_for_everyone_and_bounded():
    one, other = Text(5000, least=100), Text(5000, least=100)
    assert len(one.data) == 5000
    assert one.digest == other.digest
    first, again = one.batch(3, 4, 16, seed=1), other.batch(3, 4, 16, seed=1)
    assert bool((first[0] == again[0]).all())
    assert not bool((first[0] == one.batch(4, 4, 16, seed=1)[0]).all())


def test_text_that_is_missing_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="needed 100 bytes of Python sources, found 0"):
        Text(5000, least=100, folder=str(tmp_path))
