"""What one machine with GPUs can show, in stages with a limit each, most valuable first; `tools/one_gpu.sh` calls it.

    tools/one_gpu.sh                            # 4 ranks on the GPUs that there are; all within 12 minutes
    tools/one_gpu.sh --only "nccl smoke,speed"  # some of the stages; without the first, the others run by gloo
    tools/one_gpu.sh --dry-run                  # the same on the CPU by gloo, with small numbers

Each stage ends in one line of JSON. Results come into one JSON file as they are found, `$OUT/one_gpu.json` or
`one_gpu.json`, without names of hosts. Exit status 1 if a stage failed, was ended at its limit or wasn't reached, 2 if
there is no GPU. docs/developers/gpu.md says what it shows on one GPU and on several.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = [str(ROOT / "test" / folder) for folder in ("", "isolation", "mesh", "redistribute", "transfer")]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), *TESTS]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the ranks share the cores

from gpu_stages import BAD, RANKS, Found, Run  # noqa: E402
from gpu_stages.failures import failures  # noqa: E402
from gpu_stages.groups import nccl_groups, nccl_smoke  # noqa: E402
from gpu_stages.links import links  # noqa: E402
from gpu_stages.memory import memory  # noqa: E402
from gpu_stages.moves import compiled, nccl_fuzz  # noqa: E402
from gpu_stages.speed import speed  # noqa: E402
from gpu_stages.suites import isolation, suites  # noqa: E402
from gpu_stages.training import train  # noqa: E402
from gpu_stages.transfers import nccl_transfer, options  # noqa: E402
from gpu_stages.worlds import worlds  # noqa: E402

FORK: Any = multiprocessing.get_context("fork")  # of a process that has torch, and never asks for a device


class Stage(NamedTuple):
    name: str
    limit: float
    function: Callable[[Run], Iterator[Found]]


STAGES = (
    Stage("nccl smoke", 60, nccl_smoke),  # later stages take the settings that it finds
    Stage("speed", 120, speed),
    Stage("failures", 180, failures),
    Stage("options", 60, options),
    Stage("worlds", 90, worlds),
    Stage("nccl transfer", 90, nccl_transfer),
    Stage("nccl groups", 90, nccl_groups),
    Stage("suites", 240, suites),
    Stage("nccl fuzz", 100, nccl_fuzz),
    Stage("isolation", 75, isolation),
    Stage("memory", 75, memory),
    Stage("compile", 90, compiled),
    Stage("train", 150, train),
    Stage("links", 150, links),
)


def main(words: list[str] | None = None, stages: Iterable[Stage] = STAGES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU by gloo, with small numbers")
    parser.add_argument("--only", metavar="NAME,NAME", help="these stages")
    parser.add_argument("--seconds", type=float, default=690, help="for all of them together")
    parser.add_argument(
        "--ranks-per-gpu", type=int, help=f"that share a device; by itself as few as hold {RANKS} ranks"
    )
    parser.add_argument("--json", default=os.path.join(os.environ.get("OUT", "."), "one_gpu.json"), metavar="FILE")
    asked = parser.parse_args(words)
    chosen = [stage for stage in stages if asked.only is None or stage.name in asked.only.split(",")]
    deadline = time.monotonic() + asked.seconds
    report = Report(pathlib.Path(asked.json), asked.dry_run, chosen)
    report.data["ran on"] = facts = _facts(asked.dry_run)
    if not asked.dry_run and not facts["devices"]:
        print(f"one_gpu: needs a GPU, and torch {facts['torch']} finds none", file=sys.stderr)
        return 2
    share = asked.ranks_per_gpu or -(-RANKS // max(len(facts["devices"]), 1))
    run = Run("cpu" if asked.dry_run else "cuda", share)
    for stage in chosen:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        _carry_out(stage, run, min(stage.limit, left), report)
        settings = next((check["settings"] for check in report.checks(stage) if "settings" in check), None)
        if settings is not None:
            os.environ.update(settings)
            run = run._replace(nccl=settings)
    report.write()
    print(f"one_gpu: {report.summary()}; {report.file.name} has it", flush=True)
    return 0 if all(one["outcome"] in ("passed", "skipped") for one in report.data["stages"].values()) else 1


class Report:
    """The JSON file; written anew, in place of the last one, whenever something comes."""

    def __init__(self, file: pathlib.Path, dry: bool, stages: list[Stage]) -> None:
        self.file = file
        waiting = {stage.name: {"outcome": "not reached", "limit": stage.limit, "checks": []} for stage in stages}
        self.data: dict[str, Any] = {"dry run": dry, "ran on": {}, "stages": waiting}
        self.write()

    def write(self) -> None:
        text = json.dumps(self.data, indent=1)
        for name, said in ((str(ROOT), "."), (sys.prefix, "python"), (socket.gethostname(), "this host")):
            text = text.replace(json.dumps(name)[1:-1], said)
        new = self.file.with_suffix(".new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(self.file)

    def note(self, stage: Stage, **facts: Any) -> None:
        self.data["stages"][stage.name] |= facts
        self.write()

    def checks(self, stage: Stage) -> list[Found]:
        return self.data["stages"][stage.name]["checks"]

    def summary(self) -> str:
        return ", ".join(f"{name} {one['outcome']}" for name, one in self.data["stages"].items())


def _carry_out(stage: Stage, run: Run, limit: float, report: Report) -> None:
    """Run a stage in a process group of its own, and end all of that at the limit."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "found.jsonl")
        file.touch()
        process = FORK.Process(target=_stage, args=(stage, run, str(file)))
        begun = time.monotonic()
        report.note(stage, outcome="running")
        process.start()
        while not wait([process.sentinel], 0.2) and time.monotonic() - begun < limit:
            _read(file, stage, report)
        is_over = not wait([process.sentinel], 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with ranks that it left
        process.join(10)
        _read(file, stage, report)
    seconds = round(time.monotonic() - begun, 1)
    report.note(stage, outcome=_outcome(report.checks(stage), process.exitcode, is_over, limit), seconds=seconds)
    print(json.dumps(_line(stage, report)), flush=True)
    if is_over:
        _restart_mps()


def _line(stage: Stage, report: Report) -> dict[str, Any]:
    """A stage in one line: what it came to, and of each check its figures, or its outcome and the end of its text."""
    facts = report.data["stages"][stage.name]
    checks = []
    for check in facts["checks"]:
        said = check["outcome"] + (f": {check['text'][-200:]}" if check["outcome"] in BAD and "text" in check else "")
        figures = check.get("figures") if check["outcome"] == "right" else None
        checks.append([check["check"], check.get("where", ""), figures or said])
    return {"stage": stage.name, "outcome": facts["outcome"], "seconds": facts["seconds"], "checks": checks}


def _outcome(checks: list[Found], status: int | None, is_over: bool, limit: float) -> str:
    if is_over:
        return f"ended at its limit of {limit:.0f} s"
    if status or any(check["outcome"] in BAD for check in checks):
        return "failed"
    return "passed" if any(check["outcome"] == "right" for check in checks) else "skipped"


def _read(file: pathlib.Path, stage: Stage, report: Report) -> None:
    """Take over what a stage has found since; a line that isn't whole yet comes next time."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    if len(lines) > len(report.checks(stage)):
        report.note(stage, checks=[json.loads(line) for line in lines])


def _stage(stage: Stage, run: Run, file: str) -> None:
    os.setsid()
    logging.disable(logging.WARNING)
    with open(file, "a", encoding="utf-8") as answers:

        def say(one: Found) -> None:
            answers.write(json.dumps(one) + "\n")
            answers.flush()

        try:
            for one in stage.function(run):
                say(one)
        except Exception:  # the stage's own, or of its first world
            say({"check": "the stage itself", "outcome": "raised", "text": traceback.format_exc()})
            sys.exit(1)


def _facts(dry: bool) -> dict[str, Any]:
    """Devices and releases, asked for in a process that ends. An MPS daemon that keeps it from its GPU is ended."""
    for _ in range(2):
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_ask, args=(theirs, dry), daemon=True)
        process.start()
        theirs.close()
        try:
            facts = ours.recv() if ours.poll(90) else None
        except EOFError:
            facts = None
        process.kill()
        process.join(10)
        if facts is not None or "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
            break
        _end_mps()
        del os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    facts = facts or {"devices": [], "torch": sys.modules["torch"].__version__}
    return facts | {"python": sys.version.split()[0], "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ}


def _ask(pipe: Any, dry: bool) -> None:
    """In a process that ends: looking at CUDA forbids a fork."""
    import torch

    facts: dict[str, Any] = {"devices": [], "torch": torch.__version__}
    if not dry and torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()
        facts["devices"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    pipe.send(facts)


MPS = "nvidia-cuda-mps-control"


def _end_mps() -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([MPS], input="quit -t 5\n", text=True, timeout=20, capture_output=True)


def _restart_mps() -> None:
    """A daemon may be stuck after a client was killed."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        _end_mps()
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([MPS, "-d"], timeout=20, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
