"""The table of docs/results.md: which torch, Python and backend the tests ran on, from docs/compatibility.json.

A record is what one run of pytest was: where, which tests, and how its cases ended by the backend that they need.
"""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
import json
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

import pytest

from torch_overlay.versions import SUPPORTED

from . import marks

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "compatibility.json"
WHOLE = "all"
NEEDS = "what the case needs"  # a property of its report
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# By which a test case counts, with the head of its column; the last one is for the cases that need no process group.
BACKENDS = {"gloo": "gloo", "nccl": "NCCL", "threads": "ranks as threads", "fake": "fake", "none": "no group"}
# Torch's base classes for cases that run on several ranks.
PROCESSES = {"MultiProcessTestCase", "MultiProcContinuousTest"}
THREADS = {"MultiThreadedTestCase"}


def backend(classes: list[str], text: str, gpus: int) -> str:
    """What a case needs, from the names of its classes, the text of its file and the GPUs that torch sees.

    >>> backend(["TestMesh", "OverlayContinuous", "MultiProcContinuousTest"], "", gpus=0)
    'gloo'
    >>> backend([], 'init_process_group("fake", store=FakeStore())', gpus=0), backend([], "import torch", gpus=0)
    ('fake', 'none')
    """
    if PROCESSES & {*classes}:
        return "nccl" if gpus else "gloo"
    if THREADS & {*classes}:
        return "threads"
    return "fake" if re.search(r"FakeStore|fake_world", text) else "none"


def chosen(arguments: list[str]) -> str:
    """Which tests pytest's arguments choose: the paths and expressions among them.

    >>> chosen(["-q", "-W", "ignore"]), chosen(["README.md::x", "-k", "mesh"])
    ('all', 'README.md::x -k mesh')
    """
    found = [argument for argument in arguments if (ROOT / argument.partition("::")[0]).exists()]
    pairs = itertools.pairwise(arguments)
    return " ".join(found + [f"{flag} {value}" for flag, value in pairs if flag in ("-k", "-m", "--deselect")]) or WHOLE


@functools.cache
def gpus() -> int:
    """How many GPUs torch sees."""
    import torch

    return torch.cuda.device_count()


def pytest_sessionstart() -> None:
    """Count them before a case puts something else in torch's place."""
    gpus()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """In the process that runs a case: write down what it needs."""
    report = yield
    classes = [base.__name__ for base in getattr(getattr(item, "cls", None), "__mro__", ())]
    text = item.path.read_text(encoding="utf-8")
    report.user_properties.append((NEEDS, backend(classes, text, gpus())))
    return report


class Recorder:
    """A pytest plugin that counts how cases end, by backend, in the process above the workers if there are any."""

    def __init__(self) -> None:
        self.cases: dict[str, collections.Counter[str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A case ends with its call, or with the setup that skips or fails it."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            needs = dict(report.user_properties)[NEEDS]
            self.cases.setdefault(needs, collections.Counter())[report.outcome] += 1


def record(arguments: list[str]) -> int:
    """Run pytest with these arguments and keep the record in place of an older one of the same kind; the exit code."""
    recorder = Recorder()
    code = int(pytest.main(["-p", __name__, *arguments], plugins=[recorder]))
    if code > 1:
        print("compatibility: the run was broken off, so nothing was recorded", file=sys.stderr)
        return code
    import torch

    entry = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "tests": chosen(arguments),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "cases": {name: dict(sorted(self.items())) for name, self in sorted(recorder.cases.items())},
    }
    kept = [one for one in read() if _kind(one) != _kind(entry)]
    kept = sorted([*kept, entry], key=_kind)
    FILE.write_text(json.dumps({"runs": kept}, indent=2) + "\n", encoding="utf-8")
    return code


def read() -> list[dict[str, Any]]:
    """All records."""
    return json.loads(FILE.read_text(encoding="utf-8"))["runs"] if FILE.exists() else []


def part() -> str:
    """A row for each record, then one for each supported release and Python that has none."""
    runs = read()
    seen = {(_release(run), _minor(run)) for run in runs}
    rows = [_row(run) for run in runs]
    for release in SUPPORTED:
        missing = [minor for minor in PYTHONS if (release, minor) not in seen]
        if missing:
            rows.append([release, ", ".join(missing), "", "no run recorded", *[""] * len(BACKENDS)])
    return marks.table(["torch", "Python", "system", "tests", *BACKENDS.values()], rows)


def _row(run: dict[str, Any]) -> list[str]:
    tests = "all" if run["tests"] == WHOLE else f"`{run['tests']}`"
    cells = [_ended(run["cases"].get(name, {})) for name in BACKENDS]
    return [run["torch"], run["python"], run["system"], f"{tests}, {run['date']}", *cells]


def _ended(cases: dict[str, int]) -> str:
    """``120 passed, 2 skipped``; cases that were only skipped weren't tested."""
    if not set(cases) - {"skipped"}:
        return "not tested"
    order = ("passed", "failed", "skipped")
    return ", ".join(f"{cases[name]:,} {name}" for name in order if cases.get(name))


def _kind(run: dict[str, Any]) -> tuple[list[int], list[int], str, str]:
    """What tells two records apart, and puts them in order."""
    release, minor = ([int(part) for part in number.split(".")] for number in (_release(run), _minor(run)))
    return (release, minor, run["system"], run["tests"])


def _release(run: dict[str, Any]) -> str:
    return run["torch"].partition("+")[0]


def _minor(run: dict[str, Any]) -> str:
    return ".".join(run["python"].split(".")[:2])


def _commit() -> str:
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()
