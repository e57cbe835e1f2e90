"""Does a torch that carries the stack behave like the overlay? Tests on a patched copy, in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence

from .message import ROOT, PatchMessage, StackError
from .render import states
from .tree import Tree, copy_torch, installed_torch, write

NEEDED = ("pytest", "pytest_timeout", "hypothesis", "expecttest", "numpy")
SUITES = ("test/mesh", "test/redistribute", "test/pure")
LEFT_OUT = "what the package torch_overlay does"  # the reason of a skip, in test/way.py
# What the fake process group says before 2.15, where a rank sends nothing; the overlay has a way round it.
NO_EMPTY_BUFFER = "inputBuffer is empty"
SECONDS, LIMIT = 240, 1500  # for one test, and for a suite, on a busy machine
HEAD = ("after", *SUITES, "its tests")
Results = Mapping[str, str]

# What each process of a patched torch runs first: our package can't stand in for what the stack should bring.
_ALONE = """
import sys
sys.modules["torch_overlay"] = None
"""


def tops(messages: Sequence[PatchMessage]) -> list[int]:
    """How many patches there are at the top of each stack."""
    after = [*(message.stack for message in messages[1:]), None]
    return [n for n, (message, later) in enumerate(zip(messages, after, strict=True), 1) if message.stack != later]


def check(messages: Sequence[PatchMessage], counts: Sequence[int], suites: Sequence[str] = SUITES) -> int:
    """Render each prefix onto a copy, import it, and run the tests that its patches bring, without torch_overlay; of
    the whole stack also our suites, each test of which must end as under the overlay. Returns 1 if something
    differs."""
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise StackError(f"--check runs tests, which need {', '.join(missing)}: pip install -e '.[test,dev]'")
    print(f"| {' | '.join(HEAD)} |\n| {' | '.join(['---'] * len(HEAD))} |", flush=True)
    wrong = 0
    for count in counts:
        with tempfile.TemporaryDirectory() as name:
            folder = patched(messages[:count], pathlib.Path(name))
            cells, differing = [], []
            for suite in SUITES:
                asked = suite in suites and count == len(messages)
                ended = run([suite], ROOT, environment("patched", folder)) if asked else {}
                lines = compare(run([suite], ROOT, environment("overlay")), ended) if asked else []
                cells.append(_said(ended, lines))
                differing += lines
            ended = own_tests(messages[:count], folder)
            lines = [f"{test}: {how}" for test, how in ended.items() if how.startswith("failed")]
            cells.append(_said(ended, lines))
        print(f"| {' | '.join([f'{count} `{messages[count - 1].name}`', *cells])} |", flush=True)
        print("".join(f"  {line}\n" for line in [*differing, *lines]), end="", flush=True)
        wrong += bool(differing or lines)
    return 1 if wrong else 0


def patched(messages: Sequence[PatchMessage], folder: pathlib.Path) -> pathlib.Path:
    """A copy of the installed torch with these patches and their tests, imported once."""
    copy_torch(installed_torch(), folder)
    write(folder, states(Tree.at(installed_torch().parent), messages)[-1])
    code = f"import torch.distributed.tensor, sys; sys.exit(not torch.__file__.startswith({str(folder)!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment("patched", folder), capture_output=True, text=True
    )
    if ended.returncode:
        raise StackError(f"The copy with {len(messages)} patches can't be imported:\n{ended.stderr.strip()}")
    return folder


def own_tests(messages: Sequence[PatchMessage], folder: pathlib.Path) -> Results:
    """How the tests end that these patches bring, on the copy in the folder, and without torch_overlay."""
    alone = folder / "alone"
    alone.mkdir(exist_ok=True)
    (alone / "sitecustomize.py").write_text(_ALONE)
    tests = [test.partition("=") for message in messages for test in message.tests]
    files = sorted({f"test/distributed/{theirs or ours}" for ours, _, theirs in tests} - {_SIMULATOR})
    env = environment("stock", folder)
    return run(files, folder, {**env, "PYTHONPATH": f"{alone}{os.pathsep}{env['PYTHONPATH']}"})


_SIMULATOR = "test/distributed/tensor/planner_simulator.py"  # a helper


def environment(way: str, patched: pathlib.Path | None = None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_OVERLAY_")}
    return {**clean, "TORCH_OVERLAY_TEST": way, "PYTHONPATH": str(patched or ""), "OMP_NUM_THREADS": "1"}


def run(tests: Sequence[str], where: pathlib.Path, env: Mapping[str, str]) -> Results:
    """How each test ended. With all its ranks a run is killed after a limit: where no Python runs, a rank outlives
    pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        report = pathlib.Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        command += [f"--timeout={SECONDS}", "--timeout-method=signal", *tests]
        said = ""
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=where, env=env, start_new_session=True, **kept) as running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, _ = running.communicate(timeout=LIMIT)
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
        if running.returncode not in (0, 1) or not report.exists():
            end = said.strip().splitlines()[-1:] or [f"killed after {LIMIT} s"]
            return {", ".join(tests): f"failed (pytest didn't get through, exit {running.returncode}: {end[0]})"}
        cases = list(ET.parse(report).getroot().iter("testcase"))
    if not cases:
        raise StackError(f"pytest found no test in {', '.join(tests)}")
    return {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    for kind in ("failure", "error"):
        if (element := case.find(kind)) is not None:
            if NO_EMPTY_BUFFER in (element.text or ""):
                return "left out"
            lines = [*(element.get("message") or "no message").splitlines(), *(element.text or "").splitlines()]
            why = next((line for line in lines if re.search(r"Error\b", line)), lines[0])
            return f"failed ({why.strip()[:200]})"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "left out" if LEFT_OUT in (skipped.get("message") or "") else "skipped"


def compare(before: Results, after: Results) -> list[str]:
    """What must not be: failed, or another end than under the overlay. Only what the package does may be left out."""
    lines = []
    for name in sorted({*before, *after}):
        one, other = before.get(name, "missing"), after.get(name, "missing")
        if other != "left out" and (other.startswith("failed") or one != other):
            lines.append(f"{name}: {one} under the overlay, {other} on the patched torch")
    return lines


def _said(ended: Results, differing: Sequence[str]) -> str:
    ran = sum(outcome not in ("skipped", "left out") for outcome in ended.values())
    return "-" if not ended else f"{ran}, {len(differing)} differ" if differing else f"{ran}"
