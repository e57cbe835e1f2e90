"""Runs one client's script on all its ranks, on one side: torchrun as people type it, and what the ranks wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.sides import OVERLAY

from .catalogue import Client

TOOLS = pathlib.Path(__file__).resolve().parents[1]
FOLDER = "CLIENT_RUN_FOLDER"  # as in clients.inside, which imports torch
GRACE = 90  # seconds; torchrun gives its ranks 30
GONE = "Connection closed by peer"
WARNING = re.compile(r"Warning: |\bWARNING\b|^(\[rank\d+\]:)?W\d{4} ")
# One thread a rank, loopback, and no way to a hub: what a client needs is made from its configuration.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclasses.dataclass
class Outcome:
    """What came of one run: notes by rank and the tensors that they kept, or why there are none.

    ``warnings`` are the lines of all ranks' standard error that say so, as they stand there.
    """

    ranks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    kept: list[dict[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    failed: str | None = None


def timed(run: Outcome) -> bool:
    """Whether it took times, so that running it again says more."""
    return any(phase["seconds"] for rank in run.ranks for phase in rank["phases"].values())


def command(client: Client, side: str, logs: pathlib.Path) -> list[str]:
    """The command line; the two sides differ in four words."""
    python = [sys.executable, "-m", "torch_overlay", "run"] if side == OVERLAY else [sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={client.ranks}"]
    return [*python, *torchrun, "--redirects=3", f"--log-dir={logs}", str(client.script)]


def run(client: Client, side: str, timeout: float = 600) -> Outcome:
    """Run it. A failure of the client is an answer, not an exception; no process outlives the call."""
    with tempfile.TemporaryDirectory(prefix="torch_overlay_client_") as temporary:
        folder = pathlib.Path(temporary)
        logs = folder / "logs"
        done = _run(command(client, side, logs), {**_environment(), FOLDER: temporary}, timeout)
        errors = {path.parent.name: path.read_text(errors="replace") for path in sorted(logs.rglob("stderr.log"))}
        warnings = [line for text in errors.values() for line in text.splitlines() if WARNING.search(line)]
        if done is not None:
            return Outcome(warnings=warnings, failed=_reason(errors, done))
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(client.ranks)]
        wrong = [rank for rank, found in enumerate(ranks) if found["overlay"] != (side == OVERLAY)]
        if wrong:
            return Outcome(warnings=warnings, failed=f"the overlay isn't as asked for ({side}) on ranks {wrong}")
        import torch

        kept = [torch.load(folder / f"rank{rank}.pt") for rank in range(client.ranks)]
        return Outcome(ranks, kept, warnings)


def _environment() -> dict[str, str]:
    paths = [str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run(words: list[str], environment: dict[str, str], timeout: float) -> str | None:
    """None if it ended well, else its last words. What takes too long is asked to end, with its ranks."""
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=timeout)
        return said if process.returncode else None
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun: it leads the ranks, which have sessions of their own
        try:
            process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return f"no end in {timeout:g} s"


def _reason(errors: dict[str, str], said: str) -> str:
    """The line that says what went wrong: of a rank that failed by itself, not for want of another; else the last."""
    found = []
    for rank, text in errors.items():
        lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines()]
        found += [f"rank {rank}: {line}" for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    found.sort(key=lambda line: GONE in line)
    last = [line for line in said.splitlines() if line.strip(" =-")]
    return (found or last[-1:] or ["it said nothing"])[0]
