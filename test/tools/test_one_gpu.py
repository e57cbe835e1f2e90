"""`tools/one_gpu.sh`: a dry run on the CPU, whole, as on a machine with a GPU."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from way import needs_package
from width import NIGHTLY

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
pytestmark = [needs_package, pytest.mark.skipif(not NIGHTLY, reason="half a minute of tools: only at night")]


def test_a_dry_run_passes(tmp_path):
    """What needs a GPU says so. The file names neither this host nor its folders."""
    file = tmp_path / "one_gpu.json"
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", str(TOOLS / "one_gpu.sh"), "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    report = json.loads(file.read_text())
    assert done.returncode == 0, (done.stdout + done.stderr, file.read_text())
    skipped = {name for name, one in report["stages"].items() if one["outcome"] == "skipped"}
    assert skipped == {"suites"}
    checks = [check for one in report["stages"].values() for check in one["checks"]]
    assert sum(check["outcome"] == "right" for check in checks) >= 30
    assert socket.gethostname() not in file.read_text() and str(TOOLS.parent) not in file.read_text()
