"""Tests of the gate with their tensors on the device: the suites of test/redistribute and test/transfer on eight ranks,
and the programs of test/isolation, in which what stock keeps apart stays apart."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from . import NO_GPU, RANKS, Check, Found, Run, asked

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUITES = ("redistribute", "transfer")
SECONDS = 120.0  # for one suite
ALONE = (  # one thread on each rank, of which others know nothing
    "one_replica_gathers",
    "an_empty_last_batch",
    "one_owner_destroys_its_groups",
    "one_pair_destroys_its_group",
    "groups_of_size_1_are_destroyed",
)
BESIDE = (  # two threads, each with a mesh or a group of its own
    "metric_beside_redistribution",
    "two_private_meshes",
    "equal_meshes_in_two_threads",
    "two_meshes_two_axes",
    "a_view_made_in_a_private_block",
)


def suites(run: Run) -> Iterator[Found]:
    """By gloo and by NCCL. Some tests are of gloo's words or of the host's memory, and fail elsewhere, by name."""
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


def isolation(run: Run) -> Iterator[Found]:
    """Threads by gloo only: NCCL wants the communicators of a process used in one order on all ranks."""
    few = 2 if run.dry else len(BESIDE)
    yield from asked(run, [Check(kept_apart, (name,)) for name in BESIDE[:few]])
    yield from asked(run, [Check(kept_apart, (name,)) for name in ALONE], run.best)


# --- on every rank


def kept_apart(mesh: Any, rank: int, name: str) -> None:
    import torch

    import isolation_cases
    import isolation_tools

    isolation_tools.DEVICE = "cpu" if mesh.device_type == "cpu" else f"cuda:{torch.cuda.current_device()}"
    getattr(isolation_cases, name)(rank, RANKS)
