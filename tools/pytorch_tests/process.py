"""One process that runs pytest on one file, watched: it ends, or hangs in a case, or dies in one."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .results import Report
from .sets import File
from .side import Side

# Seconds: between looks; for stacks after SIGABRT; to import and collect, at least; from the last case to the exit.
POLL, LAST_RITES, START, EXIT = 0.1, 1.5, 300.0, 60.0


class Stopped(Exception):
    """The whole run is being stopped."""


class Process:
    """pytest on a file, in a session of its own, so that its ranks can be killed with it."""

    def __init__(self, side: Side, file: File, report: Report, arguments: Sequence[str], **job: Any):
        self.report, self.log = report, report.path.with_suffix(".log")
        task = report.path.with_suffix(".job")
        task.write_text(json.dumps({"report": str(report.path.resolve()), "name": file.name, **job}), encoding="utf-8")
        environ = side.environ(os.environ) | {"PYTORCH_TESTS_JOB": str(task.resolve())}
        ours = [
            "-p",
            "torch_overlay_reporter",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "-q",
            *arguments,
            str(file.path),
        ]
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(
                side.command(*ours),
                cwd=file.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def watch(self, limit: float, stop: threading.Event, seen: Callable[[dict[str, Any]], None]) -> str:
        """Until it has ended: "" if by itself, "timeout" if a case, the collection or the exit took over ``limit``."""
        try:
            since, results = time.monotonic(), self.report.results
            while self.child.poll() is None:
                lines = self.report.update()
                for line in lines:
                    seen(line)
                if lines:
                    since = time.monotonic()
                if stop.is_set():
                    raise Stopped
                allowed = EXIT if results.ended is not None else limit if results.running else max(limit, START)
                if time.monotonic() - since > allowed:
                    return "timeout"
                time.sleep(POLL)
            return ""
        finally:
            self.kill()
            for line in self.report.update():
                seen(line)

    def kill(self) -> None:
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

    def last_words(self) -> str:
        """The end of what it printed."""
        text = pathlib.Path(self.log).read_bytes()[-3000:].decode(errors="replace")
        return "\n".join(line for line in text.splitlines() if line.strip())[-1500:]
