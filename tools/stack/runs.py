"""Our suites and the random moves in processes of their own, on torch as installed or on a patched copy of it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Mapping, Sequence

from .message import ROOT, StackError

# Skips that a patched torch may have, in test/way.py: needs_package, and needs_mesh_check for a short prefix.
LEFT_OUT = ("what the package torch_overlay does", "what a later patch of the stack brings")
SECONDS = 240  # for one test; the machine may be busy, and a whole run shouldn't end for that
LIMIT = 900  # for a whole suite, which takes a third of it on a busy machine
NOT_THROUGH = "pytest didn't get through"
Results = Mapping[str, str]
_LACKS = re.compile(r"(?:has no attribute|Member) '(\w+)'")  # the second is dynamo's


def random_moves(patched: pathlib.Path | None) -> str:
    """How many of 50 random redistributions go wrong on each of three meshes, as ``identity 0, transposed 0, …``."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/stack/random_moves.py")]
    ended = subprocess.run(command, env=environment("stock", patched), capture_output=True, text=True)
    if ended.returncode:
        raise StackError(f"The random moves didn't get through (exit {ended.returncode}):\n{ended.stderr[-2000:]}")
    return ", ".join(f"{name} {wrong}" for name, wrong in json.loads(ended.stdout.splitlines()[-1]).items())


def environment(way: str, patched: pathlib.Path | None = None) -> dict[str, str]:
    """Of a process that runs tests in this way; the patched copy comes before the installed torch."""
    paths = [str(patched)] if patched else []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_OVERLAY_")}
    return {**clean, "TORCH_OVERLAY_TEST": way, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def results(suites: Sequence[str], way: str, patched: pathlib.Path | None = None) -> Results:
    """How each test of the suites ended: passed, skipped, left out, or failed with the reason in brackets.

    The files of tests that failed run once more: on a busy machine ranks run into time limits.
    """
    ended = _run(suites, way, patched)
    failed = {name for name, how in ended.items() if how.startswith("failed") and not _LACKS.search(how)}
    files = sorted(set(map(_file_of, failed)) - {""}) or (list(suites) if failed else [])
    kept = {name: how for name, how in ended.items() if NOT_THROUGH not in how}
    return {**kept, **_run(files, way, patched)} if files else ended


def _run(suites: Sequence[str], way: str, patched: pathlib.Path | None) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        command += [f"--timeout={SECONDS}", "--timeout-method=signal", *suites]
        ended, said = _ended(command, environment(way, patched))
        if ended not in (0, 1) or not report.exists():
            return {", ".join(suites): f"failed ({NOT_THROUGH}, exit {ended}: {said.strip().splitlines()[-1:]})"}
        cases = list(ET.parse(report).getroot().iter("testcase"))
    if not cases:
        raise StackError(f"pytest found no test in {', '.join(suites)} ({way})")
    return {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}


def _ended(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """The exit status of a run and what it said; with all its ranks it is killed after a limit.

    A rank that hangs where no Python runs, as in a constructor of gloo, outlives pytest's own limit.
    """
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as running:
        try:
            said, _ = running.communicate(timeout=LIMIT)
            return running.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
            return -signal.SIGKILL, f"killed after {LIMIT} s"


def _file_of(test: str) -> str:
    """``test/mesh/test_mesh_twin.py`` of ``test.mesh.test_mesh_twin.test_any``; empty if there is no such file."""
    parts = test.partition("[")[0].split(".")
    paths = ("/".join(parts[:end]) + ".py" for end in range(len(parts), 0, -1))
    return next((path for path in paths if (ROOT / path).is_file()), "")


def _outcome(case: ET.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            first = (found.get("message") or "no message").splitlines()[0]
            said = [first, *(found.text or "").splitlines()]  # what a rank or dynamo said is further down
            why = next((line for line in said if _LACKS.search(line)), first)
            return f"failed ({why[:200]})"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "left out" if any(why in (skipped.get("message") or "") for why in LEFT_OUT) else "skipped"


def compare(before: Results, after: Results, later: Collection[str] = ()) -> list[str]:
    """What must not be on the patched torch, a line a test: failed, or another end than before.

    Only what the package itself does may be left out there (its switch, its status, its options), and what comes with a
    later patch: members of these names, and what a test marks so.
    """
    stuck = [f"{name}: {how}" for name, how in after.items() if NOT_THROUGH in how]
    if stuck:
        return stuck
    lines = []
    for name in sorted(set(before) | set(after)):
        one, other = before.get(name, "missing"), after.get(name, "missing")
        asked = _LACKS.search(other)
        left = other == "left out" or (asked is not None and asked[1] in later)
        if not left and (other.startswith("failed") or one != other):
            lines.append(f"{name}: {one} before, {other} on the patched torch")
    return lines


def ran(ended: Results) -> int:
    return sum(outcome not in ("skipped", "left out") for outcome in ended.values())
