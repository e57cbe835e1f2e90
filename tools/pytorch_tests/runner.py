"""Run files on sides, as often as it takes until every case of a file has ended, several files at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from .process import Process, Stopped
from .results import Report, Results, slug
from .sets import File
from .side import Side

Seen = Callable[[Side, File, dict[str, Any]], None]
MEMORY_PER_JOB = 4 << 30  # bytes: four ranks with DTensor and dynamo imported, and pytest
CORES_PER_JOB = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """How files are run. ``timeout`` is in seconds, for one case."""

    state: pathlib.Path
    timeout: float = 600.0
    select: tuple[str, ...] = ()
    fork: bool = False
    stop: threading.Event = dataclasses.field(default_factory=threading.Event, compare=False)

    def globs(self) -> list[str]:
        """The patterns that are node-id globs (they have ``::`` or a wildcard); the others are pytest's -k."""
        return [text for text in self.select if "::" in text or "*" in text]

    def keywords(self) -> str:
        return " or ".join(f"({text})" for text in self.select if text not in self.globs())


def default_jobs() -> int:
    """As many files at once as cores and free memory allow, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        free = MEMORY_PER_JOB
    return max(1, min(cores // CORES_PER_JOB, free // MEMORY_PER_JOB))


def report_of(plan: Plan, side: Side, file: File, alone: str = "") -> Report:
    """Where the results of a file on a side are kept, or those of one case that is run alone."""
    key = {
        "side": side.name,
        "version": side.version,
        "file": file.name,
        "content": hashlib.sha256(file.path.read_bytes()).hexdigest()[:16],
        "torch": importlib.metadata.version("torch"),
        "python": sys.version.split()[0],
        "select": repr([alone] if alone else sorted(plan.select)),
        "ranks": "forked" if plan.fork else "spawned",
    }
    place = f"alone/{slug(f'{file.name}::{alone}')}" if alone else slug(file.name)
    return Report(plan.state / side.name / f"{place}.jsonl", key)


def run_file(plan: Plan, side: Side, file: File, seen: Seen, alone: str = "") -> Results:
    """All cases of a file on a side, or one alone. What a process leaves undone, the next one does."""
    report = report_of(plan, side, file, alone)
    results = report.open()
    if results.finished:
        seen(side, file, {"kept": len(results.cases)})
    begun = time.monotonic()
    while not results.finished:
        before = len(results.done())
        report.write(attempt=before)
        only = [f"{file.name}::{alone}"] if alone else plan.globs()
        keywords = ["-k", plan.keywords()] if plan.keywords() and not alone else []
        process = Process(side, file, report, keywords, done=results.done(), only=only, fork=plan.fork)
        hung = process.watch(plan.timeout, plan.stop, functools.partial(seen, side, file))
        _note_end(report, process, hung, plan.timeout)
        if not results.left() or len(results.done()) == before:
            report.write(finished=round(time.monotonic() - begun, 1))
    return results


def _note_end(report: Report, process: Process, hung: str, limit: float) -> None:
    """Write what pytest couldn't write itself: the case that hung or died, or that it never got to one."""
    results, code = report.results, process.child.returncode
    outcome = hung or "crashed"
    why = f"over {limit:g} s" if hung else f"the process ended with {code}"
    if results.running:
        report.write(case=results.running, outcome=outcome, seconds=limit if hung else 0.0, why=_ended(why, process))
    elif results.ended is None:
        report.write(case="(collection)", outcome=outcome, seconds=0.0, why=_ended(why, process))
    elif hung or code != results.ended:  # after the last case: a rank or a thread that doesn't end, a crash at exit
        report.write(case="(exit)", outcome=outcome, seconds=0.0, why=_ended(why, process))
    elif results.ended not in (0, 1, 5):
        report.write(case="(collection)", outcome="error", seconds=0.0, why=_ended(why, process))


def _ended(why: str, process: Process) -> str:
    return f"{why}; it said\n{process.last_words()}"


def run_all(
    plan: Plan, work: Iterable[tuple[Side, File, str]], jobs: int, seen: Seen
) -> dict[tuple[str, str, str], Results]:
    """Every (side, file, case alone or ""), ``jobs`` at a time, in order. An interrupt kills what runs."""
    work = list(work)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {
            pool.submit(run_file, plan, side, file, seen, alone): (side.name, file.name, alone)
            for side, file, alone in work
        }
        try:
            return {futures[future]: future.result() for future in concurrent.futures.as_completed(futures)}
        except (KeyboardInterrupt, Stopped, Exception):
            plan.stop.set()
            for future in futures:
                future.cancel()
            raise
