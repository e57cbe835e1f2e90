"""Format rendered files with upstream's settings, and say what its linter finds."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from .message import PATCHES, StackError

CONFIG = PATCHES / "upstream_ruff.toml"


def formatted(files: dict[str, str], sort: set[str], there: Mapping[str, str]) -> dict[str, str]:
    """The same files as upstream's formatter leaves them; imports are sorted in those of ``sort``.

    Args:
        there: the files that torch has already, whose lines stay as wide as they are.

    Raises:
        StackError: text that isn't Python, or that the linter refuses; names file, line and rule.
    """
    if importlib.util.find_spec("ruff") is None:
        raise StackError("The stack is formatted with ruff, which isn't there: pip install -e '.[dev]'")
    keys = {path: (path, text, path in sort, there.get(path)) for path, text in files.items()}
    new = {path: text for path, text in files.items() if keys[path] not in _formatted}
    for path, text in _formatted_now(new, sort & {*new}, there).items():
        _formatted[keys[path]] = text
    return {path: _formatted[keys[path]] for path in files}


# What each file became, by its path, its text and what else that depends on: a prefix has most files of the one before.
_formatted: dict[tuple[str, str, bool, str | None], str] = {}


def _formatted_now(files: dict[str, str], sort: set[str], there: Mapping[str, str]) -> dict[str, str]:
    if not files:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        if sort:
            _ruff(root, "check", "--select", "I", "--fix", "--quiet", *sorted(sort))
        if new := sorted({*files} - {*there}):  # what only lines that stay here use
            _ruff(root, "check", "--select", "F401", "--fix", "--quiet", *new)
        _ruff(root, "format", "--quiet", *files)
        found = _ruff(root, "check", "--output-format", "concise", "--quiet", *files)
        if found:
            raise StackError(f"The rendered files don't pass upstream's linter:\n{found}")
        return {path: (root / path).read_text(encoding="utf-8") for path in files}


@functools.lru_cache(maxsize=16)  # each prefix begins with the same files
def is_sorted(text: str) -> bool:
    """Whether a file keeps the order of imports that `formatted` would bring about."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "file.py").write_text(text, encoding="utf-8")
        return not _ruff(pathlib.Path(folder), "check", "--select", "I", "--quiet", "file.py")


def _ruff(root: pathlib.Path, command: str, *arguments: str) -> str:
    ruff = [sys.executable, "-m", "ruff", command, "--no-cache", "--config", str(CONFIG), *arguments]
    ended = subprocess.run(ruff, cwd=root, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1):
        raise StackError(f"ruff {command} failed ({ended.returncode}): {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout.strip()
