"""A PyTorch source tree to render onto: a folder, a commit of a git checkout, or a copy of an installed torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from torch_overlay import versions
from torch_overlay.patching import recognise
from torch_overlay.patching.patch import Kind, Patch

from .message import StackError

OLDEST = (2, 13, 0)  # the release from which on a tree can be patched
HOME = "torch/distributed/device_mesh.py"


@dataclass(frozen=True)
class Tree:
    """A folder that holds ``torch/distributed``, as it lies there or as it is at a commit."""

    root: pathlib.Path
    commit: str | None = None  # read files as of this commit; None for what lies in the folder

    @classmethod
    def at(cls, path: str | os.PathLike[str], commit: str | None = None) -> Tree:
        """Raises StackError unless the folder is PyTorch's, or one that holds a copy of the installed torch."""
        tree = cls(pathlib.Path(path).resolve(), commit)
        if not tree.exists(HOME):
            raise StackError(
                f"{tree.root} has no {HOME}. Give a PyTorch checkout, or a folder that holds a copy of the installed "
                "torch (render_stack.py --copy FOLDER makes one)."
            )
        return tree

    @property
    def release(self) -> versions.Release:
        """What the tree says that it is. Raises StackError if nothing says it."""
        for name, pattern in (("torch/version.py", r"__version__ = '([^']+)'"), ("version.txt", r"(\S+)")):
            match = re.search(pattern, self.read(name)) if self.exists(name) else None
            if match and (release := versions.parse(match[1])).number < OLDEST:
                raise StackError(
                    f"{self.root} is torch {release.text}. The stack is for 2.13 and later: before, layouts are built "
                    "otherwise, and upstream takes no changes there."
                )
            if match:
                return release
        raise StackError(f"{self.root} has neither torch/version.py nor version.txt, so its release isn't known")

    def read(self, path: str) -> str:
        return self._bytes(path).decode()

    def _bytes(self, path: str) -> bytes:
        if self.commit is None:
            return (self.root / path).read_bytes()
        return subprocess.run(
            ["git", "-C", str(self.root), "show", f"{self.commit}:{path}"], capture_output=True, check=True
        ).stdout

    def exists(self, path: str) -> bool:
        if self.commit is None:
            return (self.root / path).is_file()
        asked = ["git", "-C", str(self.root), "cat-file", "-e", f"{self.commit}:{path}"]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    def unfit(self, row: Patch) -> str | None:
        """None if the row's target is what some known release has there, else what came instead, in words."""
        if not row.qualname:
            return None
        path = f"{row.module.replace('.', '/')}.py"
        if not self.exists(path):
            return f"the tree has no {path}"
        if row.kind is Kind.ADD:
            return (
                f"{path} defines a {row.qualname} of its own"
                if "<" not in row.releases and self._defines(row)
                else None
            )
        fingerprint = self._source(row, path).fingerprint(row.qualname)
        if fingerprint is None:
            return f"{path} defines no {row.qualname}"
        known = {modules.get(row.module, {}).get(row.qualname) for modules in versions.fingerprints().values()}
        if fingerprint not in known:
            return f"{path} defines {row.qualname} with another body than any release that the stack was written for"
        return None

    def has_it(self, row: Patch) -> bool:
        return row.kind is Kind.ADD and "<" in row.releases and self._defines(row)

    def _defines(self, row: Patch) -> bool:
        source = self._source(row, f"{row.module.replace('.', '/')}.py")
        nodes = recognise.definitions(source.tree, row.qualname) if source.tree else ()
        return any(isinstance(one, ast.FunctionDef) for one in nodes)  # what a class only declares isn't there yet

    def _source(self, row: Patch, path: str) -> recognise.Source:
        return _source_of(row.module, path, self._bytes(path))


@functools.lru_cache(maxsize=16)  # each row asks
def _source_of(module: str, path: str, text: bytes) -> recognise.Source:
    source = recognise.Source(module, path)
    source.__dict__["text"] = text  # read already, and from where the tree is
    return source


def write(root: pathlib.Path, files: Mapping[str, str | None]) -> None:
    """Put these texts into a folder, None for a file that goes; all or, if one can't be written, none."""
    before = {path: (root / path).read_text() if (root / path).is_file() else None for path in files}
    try:
        for path, text in files.items():
            _put(root / path, text)
    except OSError as error:
        for written in [*files][: [*files].index(path)]:
            _put(root / written, before[written])
        raise StackError(f"{path} can't be written ({error}); nothing was changed") from error


def _put(path: pathlib.Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def installed_torch() -> pathlib.Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise StackError("torch isn't installed for this Python, so there is nothing to copy")
    return pathlib.Path(spec.origin).parent


def copy_torch(installed: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Make ``folder/torch`` to import in place of the installed one: copies of files, for commits, and links of
    folders."""
    target = folder / "torch"
    if target.exists():
        raise StackError(f"{target} is there already; give a folder without torch")
    target.mkdir(parents=True)
    for entry in sorted(installed.iterdir()):
        if entry.name == "__pycache__":
            continue
        if entry.name == "distributed":
            shutil.copytree(entry, target / "distributed")
        elif entry.is_file():
            shutil.copy(entry, target / entry.name)
        else:
            (target / entry.name).symlink_to(entry.resolve())
    return folder
