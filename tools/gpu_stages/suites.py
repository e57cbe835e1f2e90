"""The suites of test/redistribute and test/transfer on eight ranks, with their tensors on the device."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from . import Found, Run

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUITES = ("redistribute", "transfer")
SECONDS = 120.0  # for one suite


def suites(run: Run) -> Iterator[Found]:
    """By gloo and by NCCL. Some tests are of gloo's words or of the host's memory: those fail elsewhere, by name. In a
    dry run the tests are only collected: the gate runs them on the CPU."""
    for backend in dict.fromkeys(("gloo", run.best)):
        for suite in SUITES[run.dry :]:
            found: Found = {"check": f"the suite {suite}", "where": f"overlay on {backend}"}
            command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider"]
            command += ["--confcutdir", "test", f"test/{suite}/test_{suite}_ranks.py"]  # the folders above need more
            command += ["--device", run.device, "--backend", backend, "--ranks-per-gpu", str(2 * run.ranks_per_gpu)]
            yield found | _outcome([*command, "--collect-only"] if run.dry else command)


def _outcome(command: list[str]) -> Found:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        return {"outcome": "hung", "text": (said if isinstance(said, str) else said.decode())[-2000:]}
    figures: Found = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|tests collected)", done.stdout)}
    if not done.returncode and figures:
        return {"outcome": "right", "figures": figures}
    figures["names"] = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    outcome = "wrong" if figures.get("failed") else "raised"
    return {"outcome": outcome, "figures": figures, "text": (done.stdout + done.stderr)[-2000:]}
