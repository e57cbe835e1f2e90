"""`tools/one_gpu.sh`: a dry run on the CPU; a stage that hangs, fails or dies ends, is said, and stops no other."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from way import needs_package
from width import NIGHTLY

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
STAGES = ["smoke", "fuzz", "transfer", "nccl smoke", "nccl fuzz", "nccl transfer", "nccl groups", "worlds"]
STAGES += ["isolation", "memory", "compile", "train", "times", "tuning", "suites"]
pytestmark = needs_package


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import one_gpu

    return one_gpu


@pytest.mark.skipif(not NIGHTLY, reason="half a minute of tools: only at night")
def test_a_dry_run_passes(tmp_path):
    """Whole, as on a machine with a GPU; what needs one says so. The file names neither this host nor its folders."""
    file = tmp_path / "out" / "one_gpu.json"
    file.parent.mkdir()
    environment = {**os.environ, "OUT": str(file.parent), "PYTHON": sys.executable}
    command = ["bash", str(TOOLS / "one_gpu.sh"), "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    found = json.loads(file.read_text())
    assert done.returncode == 0, (done.stdout + done.stderr, file.read_text())
    assert {name: one["outcome"] for name, one in found["stages"].items()} == {
        name: "skipped" if name in ("nccl fuzz", "suites") else "passed" for name in STAGES
    }
    checks = [check for one in found["stages"].values() for check in one["checks"]]
    skipped = {check["check"] for check in checks if check["outcome"] == "skipped: needs a GPU"}
    assert {"settings", "random cases on nccl", "on a stream", "cuda graph"} <= skipped
    assert sum(check["outcome"] == "right" for check in checks) >= 30
    assert socket.gethostname() not in file.read_text() and str(TOOLS.parent) not in file.read_text()


def hangs(run):
    yield {"check": "before", "outcome": "right"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield {"check": "a process of its own", "outcome": "right", "figures": {"pid": child.pid}}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def fails(run):
    yield {"check": "one", "outcome": "right"}
    raise ValueError(f"planted in {TOOLS}")


def dies(run):
    yield {"check": "one", "outcome": "right"}
    os._exit(3)


def wrong(run):
    yield {"check": "one", "outcome": "wrong", "text": "planted"}


def right(run):
    yield {"check": "one", "outcome": "right"}


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_stage_that_hangs_or_fails_ends_and_the_next_one_runs(one_gpu, tmp_path):
    file = tmp_path / "found.json"
    stages = [one_gpu.Stage(one.__name__, 3 if one is hangs else 60, one) for one in (hangs, fails, dies, wrong, right)]
    assert one_gpu.main(["--dry-run", "--json", str(file)], stages) == 1
    found = json.loads(file.read_text())["stages"]
    outcomes = {name: one["outcome"] for name, one in found.items()}
    failed = dict.fromkeys(("fails", "dies", "wrong"), "failed")
    assert outcomes == {"hangs": "ended at its limit of 3 s", **failed, "right": "passed"}
    (pid,) = [check["figures"]["pid"] for check in found["hangs"]["checks"] if "figures" in check]
    assert not is_alive(pid)
    assert found["fails"]["checks"][-1]["text"].endswith("ValueError: planted in ./tools\n")
    assert one_gpu.main(["--dry-run", "--json", str(file)], stages[-1:]) == 0


def stuck(mesh, rank):
    if rank == 2:
        time.sleep(600)


def lost(mesh, rank):
    return "lost on rank 1" if rank == 1 else None


def gone(mesh, rank):
    if rank == 3:
        os._exit(1)
    return {"here": rank}


@pytest.mark.skipif(not NIGHTLY, reason="half a minute of tools: only at night")
def test_a_rank_that_hangs_costs_its_check_alone(one_gpu, tmp_path):
    from gpu_stages import Check, asked

    def stage(run):
        checks = [Check(lost), Check(stuck), Check(gone, dies=(3,)), Check(right_here)]
        yield from asked(run._replace(seconds=12.0), checks)

    file = tmp_path / "found.json"
    assert one_gpu.main(["--dry-run", "--json", str(file)], [one_gpu.Stage("ranks", 200, stage)]) == 1
    checks = json.loads(file.read_text())["stages"]["ranks"]["checks"]
    assert [check["outcome"] for check in checks] == ["wrong", "hung", "right", "right"]
    assert checks[0]["text"] == "rank 1: lost on rank 1" and checks[2]["figures"]["here"] < 3


def right_here(mesh, rank):
    return None
