"""The suites of test/redistribute and test/transfer on eight ranks, with their tensors on the device."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from . import NO_GPU, Found, Run

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUITES = ("redistribute", "transfer")
SECONDS = 120.0  # for one suite


def suites(run: Run) -> Iterator[Found]:
    """By gloo and by NCCL. Some tests are of gloo's words or of the host's memory: those fail elsewhere, by name. The
    gate has them on the CPU, so that a dry run leaves them out."""
    if run.dry:
        yield {"check": "the suites", "outcome": NO_GPU}
        return
    for backend in dict.fromkeys(("gloo", run.best)):
        for suite in SUITES:
            answer: Found = {"check": f"the suite {suite}", "where": f"overlay on {backend}"}
            yield answer | _outcome(command(suite, run.device, backend, 2 * run.ranks_per_gpu))


def command(suite: str, device: str, backend: str, ranks_per_gpu: int) -> list[str]:
    """By pytest alone: what the conftest.py above the tests needs isn't there."""
    words = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", "--confcutdir", "test"]
    words += ["--device", device, "--backend", backend, "--ranks-per-gpu", str(ranks_per_gpu)]
    return [*words, f"test/{suite}/test_{suite}_ranks.py"]


def _outcome(command: list[str]) -> Found:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        return {"outcome": "hung", "text": (said if isinstance(said, str) else said.decode())[-2000:]}
    figures: Found = {how: int(n) for n, how in re.findall(r"(\d+) (passed|failed|tests collected)", done.stdout)}
    if not done.returncode and figures:
        return {"outcome": "right", "figures": figures}
    figures["names"] = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    outcome = "wrong" if figures.get("failed") else "raised"
    return {"outcome": outcome, "figures": figures, "text": (done.stdout + done.stderr)[-2000:]}
