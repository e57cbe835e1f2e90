"""A fleet between four hosts, whose cables are cut and mended, and whose servers are killed and come back."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from program_fleet import TIMEOUT, values
from rank_checkpoint import write_folder
from torch_overlay.testing.hosts import Hosts, lacking
from width import NIGHTLY

pytestmark = [
    pytest.mark.skipif(not NIGHTLY, reason="minutes of slow links: TORCH_OVERLAY_NIGHTLY=1"),
    pytest.mark.skipif(bool(why := lacking()), reason=why or "hosts can be made"),
]
PROGRAM = Path(__file__).with_name("program_fleet.py")
SERVERS = {"a": 1, "b": 1, "c": 2, "d": 3}  # each with its host
LONG = float(os.environ.get("OVERLAY_TESTS_SECONDS", 60))


@pytest.mark.parametrize("mode", ["whole", "background", "changes", "checkpoint"])
def test_cables_are_cut(tmp_path, mode):
    rng = random.Random(mode)
    if mode == "checkpoint":
        (tmp_path / "checkpoint").mkdir()
        write_folder(tmp_path / "checkpoint", values(1, mode))
    with Hosts(4, 400) as hosts:

        def start(host, who):
            return hosts.start(host, [sys.executable, str(PROGRAM), str(tmp_path), mode, who])

        trainers = [start(0, str(rank)) for rank in range(2)]
        servers = {name: start(host, name) for name, host in SERVERS.items()}
        all_come(tmp_path)
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            if rng.random() < 0.7:
                host = rng.randint(1, 3)
                hosts.cut(host)
                time.sleep(rng.uniform(2, 12))
                hosts.cut(host, down=False)
            else:
                name = rng.choice([*SERVERS])
                kill(servers[name])
                servers[name] = start(SERVERS[name], name)
            time.sleep(rng.uniform(0, 6))
        (tmp_path / "all").unlink()
        all_come(tmp_path)
        (tmp_path / "stop").touch()
        for process in (*trainers, *servers.values()):
            assert process.wait(60) == 0
    runs = [json.loads((tmp_path / f"trainer {rank}.json").read_text()) for rank in range(2)]
    heard = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in SERVERS}
    assert len(runs[0]) == len(runs[1]) > 10
    print(mode, len(runs[0]), "runs,", sum([len(run["gone"]) for run in runs[0]]), "gone,", {r["way"] for r in runs[0]})
    for of_trainer in runs:
        assert all(run["took"] < max(len(run["gone"]), 1) * (TIMEOUT + 5) + 2 for run in of_trainer), of_trainer
        assert {*of_trainer[-1]["there"]} == {*SERVERS}
        assert sum([len(run["gone"]) for run in of_trainer]) > 0
    for name, said in heard.items():
        versions = [version for version, _ in said if version is not None]
        assert all(is_right is True for version, is_right in said if version is not None), (name, said)
        assert versions[-1] == len(runs[0])


def all_come(folder):
    until = time.monotonic() + 180
    while not (folder / "all").exists():
        assert time.monotonic() < until, "the servers don't come"
        time.sleep(0.1)


def kill(process):
    """A process with its children: `unshare` and `sh` run the program."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    process.kill()
    process.wait()
