"""What people see: a bar a file while it runs, then the table, then each difference with its last words."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .difference import Difference, Judgement, Verdict
from .results import BAD, Results
from .sets import File
from .side import Side

STYLES = {Verdict.BROKEN: "bold red", Verdict.FIXED: "green", Verdict.SKIPPED: "yellow", Verdict.FLAKY: "magenta"}


SHORT = {Verdict.FAILING: "failing", Verdict.SKIPPED: "skipped"}  # above the columns of the table


class Bars:
    """One bar for each file on each side that has begun; off the terminal, a line for each that ended badly."""

    def __init__(self, console: Console):
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self._lock = threading.Lock()
        self._tasks: dict[tuple[str, str], Any] = {}

    def __call__(self, side: Side, file: File, line: dict[str, Any]) -> None:
        with self._lock:
            key = side.name, file.name
            if key not in self._tasks:
                self._tasks[key] = self.progress.add_task(f"{side.name} {file.name}", total=None)
            task = self._tasks[key]
            if "collected" in line:
                completed = self.progress.tasks[task].completed
                self.progress.update(task, total=completed + len(line["collected"]))
            elif "outcome" in line:
                self.progress.advance(task)
                if line["outcome"] in BAD:
                    text = f"{side.name}: {line['outcome']}: {file.name}::{line['case']}"
                    self.console.print(escape(text), style="red", highlight=False, soft_wrap=True)
            elif "kept" in line:
                self.progress.update(task, total=line["kept"], completed=line["kept"])


def table(differences: Sequence[Difference], times: Mapping[tuple[str, str], Results], other: str) -> Table:
    """A row a file: how its cases compare, and how long each side took. Of a terminal of 80 columns the file has 15 at
    least, since verdicts that no case has are left out."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("file", overflow="fold", min_width=15)
    verdicts = [each for each in Verdict if each is Verdict.SAME or any(found.verdict is each for found in differences)]
    for verdict in verdicts:
        shown.add_column(SHORT.get(verdict, verdict.value), justify="right", no_wrap=True)
    for side in ("stock", other):
        shown.add_column(side, justify="right", no_wrap=True)
    counts: dict[str, collections.Counter[Verdict]] = collections.defaultdict(collections.Counter)
    for found in differences:
        counts[found.name.partition("::")[0]][found.verdict] += 1
    for file, count in counts.items():
        seconds = [f"{times[side, file].seconds:.0f} s" for side in ("stock", other)]
        shown.add_row(file, *(str(count[verdict] or "") for verdict in verdicts), *seconds)
    if len(counts) > 1:
        total = sum(counts.values(), collections.Counter())
        shown.add_section()
        shown.add_row("sum", *(str(total[verdict] or "") for verdict in verdicts), "", "")
    return shown


def differences(found: Sequence[Difference], judgement: Judgement, console: Console) -> None:
    """Each case that differs, with how it ended on both sides and why."""
    for verdict in (Verdict.FIXED, Verdict.SKIPPED, Verdict.FLAKY, Verdict.BROKEN):
        cases = [one for one in found if one.verdict is verdict]
        if cases:
            console.print(f"\n{verdict.value}", style=STYLES[verdict])
        for one in cases:
            ends = [case.outcome if case else "not there" for case in (one.stock, one.other)]
            _line(console, f"  {one.name}: {ends[0]} -> {ends[1]}")
            entry = judgement.explained.get(one.name)
            why = f"expected: {entry.reason}" if entry else ((one.other and one.other.why) or "")
            lines = why.splitlines()
            for text in [*lines[:-5][:1], *lines[-5:]] if one.is_loss or entry else ():
                _line(console, f"      {text}")


def verdict_of(judgement: Judgement, console: Console) -> None:
    """The end: what is unexpected, what is stale."""
    for entry, why in judgement.stale:
        _line(console, f"expectation {entry.pattern} {why}. Its reason was: {entry.reason}")
    if judgement.unexpected:
        names = {found.name for found in judgement.unexpected}
        _line(console, f"{len(names)} test cases are worse than on stock, and nobody expected it")
    if judgement.passed:
        expected = f"; {len(judgement.explained)} are expected" if judgement.explained else ""
        _line(console, f"nothing is worse than on stock{expected}")


def _line(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
