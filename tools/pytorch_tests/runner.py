"""Run test files by pytest in processes of their own, as many as it takes until each case ended, hung or crashed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .sets import File
from .side import Side

# How a case may end. "not run" is for those that a failed case before them took along.
GOOD, SKIPPED = ("passed", "xfailed"), ("skipped",)
BAD = ("failed", "error", "xpassed", "crashed", "timeout", "not run")
JOBS = max(1, (os.cpu_count() or 1) // 4)  # files at a time; each has four ranks, of 1 GB
# Seconds: between looks; for stacks after SIGABRT; to import and collect, at least; from the last case to the exit.
POLL, LAST_RITES, START, EXIT = 0.1, 1.5, 300.0, 60.0


class Case(NamedTuple):
    outcome: str
    why: str = ""


@dataclasses.dataclass
class Results:
    """The cases of a file that ended on a side, and those that were collected."""

    cases: dict[str, Case] = dataclasses.field(default_factory=dict)
    collected: dict[str, None] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def done(self) -> list[str]:
        """Cases that needn't be run again."""
        return [name for name, case in self.cases.items() if case.outcome != "not run"]


class Stopped(Exception):
    """The whole run is being stopped."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How files are run. ``timeout`` is in seconds, for one case; logs say what each process printed."""

    logs: pathlib.Path
    timeout: float = 600.0
    select: tuple[str, ...] = ()
    fork: bool = False
    stop: threading.Event = dataclasses.field(default_factory=threading.Event, compare=False)

    def globs(self) -> list[str]:
        """The patterns that are node-id globs (they have ``::`` or a wildcard); the others are pytest's -k."""
        return [text for text in self.select if "::" in text or "*" in text]

    def keywords(self) -> list[str]:
        words = " or ".join(f"({text})" for text in self.select if text not in self.globs())
        return ["-k", words] if words else []


def run_all(plan: Plan, work: Iterable[tuple[Side, File]], jobs: int) -> dict[tuple[str, str], Results]:
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run_file, plan, side, file): (side.name, file.name) for side, file in work}
        try:
            return {futures[future]: future.result() for future in concurrent.futures.as_completed(futures)}
        except BaseException:
            plan.stop.set()
            for future in futures:
                future.cancel()
            raise


def run_file(plan: Plan, side: Side, file: File) -> Results:
    """All cases of a file on a side. What a process leaves undone, the next one does."""
    results, begun, before = Results(), time.monotonic(), -1
    log = plan.logs / side.name / (re.sub(r"[^\w.]+", "-", file.name.removesuffix(".py")) + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    while before < len(results.done()) and (before < 0 or results.collected.keys() - results.done()):
        before = len(results.done())
        _Process(plan, side, file, results, log).watch()
    results.seconds = time.monotonic() - begun
    print(f"{side.name}: {file.name}: {len(results.cases)} cases, {results.seconds:.0f} s", file=sys.stderr, flush=True)
    return results


class _Process:
    """pytest on the cases of a file that aren't done, in a session of its own, so that its ranks can be killed with
    it."""

    def __init__(self, plan: Plan, side: Side, file: File, results: Results, log: pathlib.Path) -> None:
        self.plan, self.side, self.file, self.results, self.log = plan, side, file, results, log
        self.running, self.ended = "", None  # the case, and pytest's exit status when it got that far
        self.report, job = log.with_suffix(".jsonl").resolve(), log.with_suffix(".job").resolve()
        self.report.write_text("")
        task = {"report": str(self.report), "name": file.name, "done": results.done(), "only": plan.globs()}
        job.write_text(json.dumps(task | {"fork": plan.fork}), encoding="utf-8")
        words = ["-p", "torch_overlay_reporter", "-p", "no:cacheprovider", "--tb=short", "-q", *plan.keywords()]
        environment = side.environ(os.environ) | {"PYTORCH_TESTS_JOB": str(job)}
        with open(log, "ab") as said:
            self.child = subprocess.Popen(
                side.command(*words, str(file.path)),
                cwd=file.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def watch(self) -> None:
        """Until it has ended, or a case, the collection or the exit takes longer than the limit; note what pytest
        couldn't."""
        since, hung = time.monotonic(), False
        with open(self.report, encoding="utf-8") as report:
            try:
                while self.child.poll() is None and not hung:
                    for line in _lines(report):
                        self._take(line)
                        since = time.monotonic()
                    if self.plan.stop.is_set():
                        raise Stopped
                    limit = self.plan.timeout if self.running else max(self.plan.timeout, START)
                    hung = time.monotonic() - since > (limit if self.ended is None else EXIT)
                    time.sleep(POLL)
            finally:
                self._kill()
                for line in _lines(report):
                    self._take(line)
        code = self.child.returncode
        if self.running:
            self._note(self.running, hung)
        elif self.ended is None:
            self._note("(collection)", hung)
        elif hung or code != self.ended:  # after the last case: a rank or a thread that doesn't end, a crash at exit
            self._note("(exit)", hung)
        elif self.ended not in (0, 1, 5):
            self._end("(collection)", "error", self._last_words())

    def _take(self, line: dict[str, Any]) -> None:
        if "began" in line:
            self.running = line["case"]
        elif "outcome" in line:
            self.running = ""
            self._end(line["case"], line["outcome"], line["why"])
        elif "collected" in line:
            self.results.collected |= dict.fromkeys(line["collected"])
        elif "ended" in line:
            self.ended = line["ended"]

    def _note(self, case: str, hung: bool) -> None:
        why = f"over {self.plan.timeout:g} s" if hung else f"the process ended with {self.child.returncode}"
        self._end(case, "timeout" if hung else "crashed", f"{why}; it said\n{self._last_words()}")

    def _end(self, case: str, outcome: str, why: str) -> None:
        self.results.cases[case] = Case(outcome, why)
        if outcome in BAD:
            print(f"{self.side.name}: {outcome}: {self.file.name}::{case}", file=sys.stderr, flush=True)

    def _kill(self) -> None:
        """It and its ranks; what it was doing goes to the log."""
        if self.child.poll() is None:
            self._signal(signal.SIGABRT)  # pytest's fault handler writes the stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(LAST_RITES)
        self._signal(signal.SIGKILL)
        self.child.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, number)

    def _last_words(self) -> str:
        text = self.log.read_bytes()[-3000:].decode(errors="replace")
        return "\n".join(line for line in text.splitlines() if line.strip())[-1500:]


def _lines(report: Any) -> Iterator[dict[str, Any]]:
    """What was written since. A line that isn't whole yet comes next time."""
    while True:
        at = report.tell()
        text = report.readline()
        if not text.endswith("\n"):
            report.seek(at)
            return
        yield json.loads(text)
