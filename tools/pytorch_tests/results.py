"""`Results`, what is known of one file on one side: read from its report, and kept there from run to run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
from typing import Any

# How a case may end. "not run" is for those that a failed case before them took along.
GOOD, SKIPPED = ("passed", "xfailed"), ("skipped",)
BAD = ("failed", "error", "xpassed", "crashed", "timeout", "not run")


@dataclasses.dataclass(frozen=True)
class Case:
    """How one test case ended."""

    outcome: str
    seconds: float = 0.0
    why: str = ""


@dataclasses.dataclass
class Results:
    """The cases of a file that ended, those that were collected, and the one that runs."""

    cases: dict[str, Case] = dataclasses.field(default_factory=dict)
    collected: list[str] = dataclasses.field(default_factory=list)
    running: str = ""
    ended: int | None = None  # pytest's exit status, when its last process got that far
    finished: bool = False
    seconds: float = 0.0

    def take(self, line: dict[str, Any]) -> None:
        """One line of a report."""
        if "began" in line:
            self.running = line["case"]
        elif "outcome" in line:
            self.running = ""
            self.cases[line["case"]] = Case(line["outcome"], line["seconds"], line["why"])
        elif "collected" in line:
            self.collected = list(dict.fromkeys([*self.collected, *line["collected"]]))
        elif "attempt" in line:
            self.running, self.ended = "", None
        elif "ended" in line:
            self.ended = line["ended"]
        elif "finished" in line:
            self.finished, self.seconds = True, line["finished"]

    def done(self) -> list[str]:
        """Cases that needn't be run again."""
        return [name for name, case in self.cases.items() if case.outcome != "not run"]

    def left(self) -> list[str]:
        """Cases that were collected and haven't ended."""
        done = set(self.done())
        return [name for name in self.collected if name not in done]


class Report:
    """The file of one `Results`: a first line that says what it is for, then one line an event."""

    def __init__(self, path: pathlib.Path, key: dict[str, str]):
        self.path, self.key = path, key
        self.results = Results()
        self._read = 0

    def open(self) -> Results:
        """What an earlier run left, if it was of the same file, torch and side; else a new report."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.path, encoding="utf-8") as file:
                known = json.loads(file.readline()).get("key") == self.key
        except (OSError, ValueError):
            known = False
        if not known:
            self.path.write_text(json.dumps({"key": self.key}) + "\n", encoding="utf-8")
        elif not self.path.read_bytes().endswith(b"\n"):  # killed while it wrote: a line of its own for what follows
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("\n")
        self.update()
        return self.results

    def update(self) -> list[dict[str, Any]]:
        """Take what was written since; the new lines."""
        with open(self.path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = []
        for raw in whole.splitlines():
            try:
                lines.append(json.loads(raw))
            except ValueError:
                continue  # the half line of a killed process: its case counts as running
            self.results.take(lines[-1])
        return lines

    def write(self, **line: object) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.update()


def slug(name: str) -> str:
    """A file name for any text: its readable characters, and a digest where two could clash."""
    plain = re.sub(r"[^\w.]+", "-", name.removesuffix(".py"))
    return plain if len(plain) < 100 else f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
