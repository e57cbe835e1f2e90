"""Does a torch that carries the stack behave like the overlay? Our suites on a patched copy, results side by side."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence

from .copied import copy_torch, installed_torch
from .message import ROOT, PatchMessage, StackError
from .render import Prefix
from .tree import Tree, write

NEEDED = ("pytest", "pytest_timeout", "hypothesis", "expecttest", "numpy")
SUITES = ("test/pure", "test/mesh", "test/redistribute")
# Skips that a patched torch may have, in test/way.py: needs_package, and needs_mesh_check for a short prefix.
LEFT_OUT = ("what the package torch_overlay does", "what a later patch of the stack brings")
Results = Mapping[str, str]


def check(messages: Sequence[PatchMessage], counts: Sequence[int], suites: Sequence[str] = SUITES) -> int:
    """Render each prefix onto a copy, import it, run what must hold there, print the table; 1 if something differs.

    The whole stack runs the suites, and each test must end as it does under the overlay. Before the last patch new
    behaviour is off, so the tests of meshes must end as on torch as it is; a patch that only brings files without
    callers can't change how they end. Each prefix runs the tests that it brings, and the random moves.
    """
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise StackError(f"--check runs the suites, which need {', '.join(missing)}: pip install -e '.[test,dev]'")
    wrong = 0
    plain = functools.cache(lambda way, run: results(run, way))
    print(f"torch as it is: random moves wrong {random_moves(None)}", flush=True)
    for count in counts:
        whole = count == len(messages)
        with tempfile.TemporaryDirectory() as folder:
            patched = patched_copy(messages, count, pathlib.Path(folder))
            way, before, after = "patched" if whole else "stock", {}, {}
            run = tuple(suites) if whole else tuple(suite for suite in suites if suite.startswith("test/mesh"))
            if run and (whole or messages[count - 1].changes_torch):
                before, after = plain("overlay" if whole else "stock", run), results(run, way, patched)
            differing = compare(before, after)
            brought = [f"test/{test.partition('=')[0]}" for message in messages[:count] for test in message.tests]
            ended = results(brought, "patched", patched)
            differing += [
                f"{name}: {outcome}, and its patch is in" for name, outcome in ended.items() if outcome != "passed"
            ]
            moved = random_moves(patched)
        ran = sum(outcome not in ("skipped", "left out") for outcome in after.values()) + len(ended)
        said = "each ends as before" if not differing else f"{len(differing)} differ"
        name = messages[count - 1].name
        print(f"{count} of {len(messages)}, {name}: {ran} tests, {said}; random moves wrong {moved}", flush=True)
        print("".join(f"  {line}\n" for line in differing), end="", flush=True)
        wrong += bool(differing)
    return 1 if wrong else 0


def random_moves(patched: pathlib.Path | None) -> str:
    """How many of 50 random redistributions go wrong on each of three meshes, as ``identity 0, transposed 0, …``."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/stack/random_moves.py")]
    ended = subprocess.run(command, env=environment("stock", patched), capture_output=True, text=True)
    if ended.returncode:
        raise StackError(f"The random moves didn't get through (exit {ended.returncode}):\n{ended.stderr[-2000:]}")
    return ", ".join(f"{name} {wrong}" for name, wrong in json.loads(ended.stdout.splitlines()[-1]).items())


@functools.cache
def _probes() -> list[tuple[str, str]]:
    """What our suites and the rest of the package look into, which users of torch don't."""
    found = []
    for home in ("test", "torch_overlay"):
        for path in sorted((ROOT / home).rglob("*.py")):
            inside = path.relative_to(ROOT / home).parts[:-1]
            if home == "test" or inside[:1] != ("distributed",):
                text = path.read_text(encoding="utf-8").replace("torch_overlay.distributed", "torch.distributed")
                found.append((".".join(["torch", *inside]), text))
    return found


def patched_copy(messages: Sequence[PatchMessage], count: int, folder: pathlib.Path) -> pathlib.Path:
    """A copy of the installed torch with the first ``count`` patches, imported once."""
    copy_torch(installed_torch(), folder)
    later = [message.name for message in messages[count:]]
    write(folder, dict(Prefix(Tree.at(folder), messages[:count], later, probes=_probes()).files()))
    code = f"import torch.distributed.tensor, sys; sys.exit(not torch.__file__.startswith({str(folder)!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment("patched", folder), capture_output=True, text=True
    )
    if ended.returncode:
        raise StackError(f"The copy with {count} patches can't be imported:\n{ended.stderr.strip()}")
    return folder


def environment(way: str, patched: pathlib.Path | None = None) -> dict[str, str]:
    """Of a process that runs tests in this way; the patched copy comes before the installed torch."""
    paths = [str(patched)] if patched else []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_OVERLAY_")}
    return {**clean, "TORCH_OVERLAY_TEST": way, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def results(suites: Sequence[str], way: str, patched: pathlib.Path | None = None) -> Results:
    """How each test of the suites ended: passed, skipped, left out, or failed with the reason in brackets."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *suites]
        ended = subprocess.run(command, cwd=ROOT, env=environment(way, patched), capture_output=True, text=True)
        if ended.returncode not in (0, 1) or not report.exists():
            said = ended.stdout[-2000:] + ended.stderr[-2000:]
            raise StackError(f"pytest didn't get through ({way}, exit {ended.returncode}):\n{said}")
        cases = list(ET.parse(report).getroot().iter("testcase"))
    if not cases:
        raise StackError(f"pytest found no test in {', '.join(suites)} ({way})")
    return {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            why, *_ = (found.get("message") or "no message").splitlines()
            return f"failed ({why[:200]})"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "left out" if any(why in (skipped.get("message") or "") for why in LEFT_OUT) else "skipped"


def compare(before: Results, after: Results) -> list[str]:
    """What must not be on the patched torch, a line a test: failed, or another end than before.

    Only what the package itself does may be left out there (its switch, its status, its options), and what comes with a
    later patch.
    """
    lines = []
    for name in sorted(set(before) | set(after)):
        one, other = before.get(name, "missing"), after.get(name, "missing")
        if other.startswith("failed") or (one != other and other != "left out"):
            lines.append(f"{name}: {one} before, {other} on the patched torch")
    return lines
