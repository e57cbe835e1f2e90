"""Format rendered files with upstream's settings. What its linters ask besides, they ask there."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping

from .message import PATCHES, StackError

CONFIG = PATCHES / "upstream_ruff.toml"


class Format:
    """Upstream's formatter. If imports of a file of torch's (`torchs`) are sorted, or all used, that stays so."""

    def __init__(self, torchs: Callable[[str], str | None]) -> None:
        if importlib.util.find_spec("ruff") is None:
            raise StackError("The stack is formatted with ruff, which isn't there: pip install -e '.[dev]'")
        self.torchs = torchs

    def __call__(self, files: Mapping[str, str]) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, text in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text, encoding="utf-8")
            for rule in ("F401", "I"):
                if passing := sorted(path for path in files if self._passed(path, rule)):
                    _ruff(root, "check", "--select", rule, "--fix", "--quiet", *passing)
            _ruff(root, "format", "--quiet", *files)
            return {path: (root / path).read_text(encoding="utf-8") for path in files}

    @functools.cache  # noqa: B019  one for a rendering
    def _passed(self, path: str, rule: str) -> bool:
        text = self.torchs(path)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "file.py").write_text(text or "", encoding="utf-8")
            return text is None or not _ruff(pathlib.Path(folder), "check", "--select", rule, "--quiet", "file.py")


def _ruff(root: pathlib.Path, command: str, *arguments: str) -> str:
    ruff = [sys.executable, "-m", "ruff", command, "--no-cache", "--config", str(CONFIG), *arguments]
    ended = subprocess.run(ruff, cwd=root, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1):
        raise StackError(f"ruff {command} failed ({ended.returncode}): {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout.strip()
