"""Upstream's type checker: what it finds after each patch, and not in torch as it is."""

from __future__ import annotations

import collections
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence

from .message import PATCHES, StackError
from .tree import copy_torch, installed_torch, write

CONFIG = PATCHES / "pyrefly.toml"
_PLACE = re.compile(r":\d+:\d+(-[\d:]+)?")


def check_types(names: Sequence[str], states: Sequence[Mapping[str, str | None]]) -> int:
    """Print what is new after each patch, and how many patches were checked; 1 if there was something.

    Args:
        names: of the patches.
        states: the files before the first patch, as the installed torch has them, and after each.

    Raises:
        StackError: pyrefly isn't there, or didn't get through.
    """
    if importlib.util.find_spec("pyrefly") is None:
        raise StackError("Types are checked with pyrefly, as upstream does: pip install -e '.[dev]'")
    first, *after = [
        {p: t for p, t in state.items() if p.startswith("torch/") and p.endswith(".py")} for state in states
    ]
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = copy_torch(installed_torch(), pathlib.Path(name))
        known = _errors(folder, {path for path, text in first.items() if text})
        for number, (patch, files) in enumerate(zip(names, after, strict=True), 1):
            write(folder, files)
            found = _errors(folder, {path for path, text in files.items() if text and text != first.get(path)}) - known
            lines = "".join(f"  {line}\n" for line in sorted(found.elements()))
            if lines:
                print(f"{number} `{patch}`\n{lines}", end="", flush=True)
            wrong += bool(lines)
    print(f"{len(names)} patches, {wrong} with type errors that torch as it is doesn't have")
    return 1 if wrong else 0


def _errors(folder: pathlib.Path, files: Collection[str]) -> collections.Counter[str]:
    """Without lines and columns, which move."""
    pyrefly = [sys.executable, "-m", "pyrefly", "check", "--config", str(CONFIG), "--search-path", str(folder)]
    ended = subprocess.run(
        [*pyrefly, "--output-format", "min-text", *sorted(files)], cwd=folder, capture_output=True, text=True
    )
    lines = [_PLACE.sub("", line) for line in ended.stdout.splitlines() if line.startswith("ERROR")]
    if ended.returncode not in (0, 1) or bool(ended.returncode) != bool(lines):
        raise StackError(f"pyrefly failed ({ended.returncode}): {ended.stderr.strip() or ended.stdout.strip()}")
    return collections.Counter(lines)
