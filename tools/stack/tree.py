"""A PyTorch source tree to render onto: a folder, or a commit of a git checkout. Reading here; `write` for folders."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import re
import subprocess
from dataclasses import dataclass

from torch_overlay import versions
from torch_overlay.patching import recognise
from torch_overlay.patching.patch import Kind, Patch

from .message import StackError

OLDEST = (2, 13, 0)  # the release from which on a tree can be patched
HOME = "torch/distributed/device_mesh.py"


@dataclass(frozen=True)
class Tree:
    """A folder that holds ``torch/distributed``, as it lies there or as it is at a commit.

    Attributes:
        commit: read files as of this commit; None for what lies in the folder.
    """

    root: pathlib.Path
    commit: str | None = None

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
            found = re.search(pattern, self.read(name)) if self.exists(name) else None
            if found and (release := versions.parse(found[1])).number < OLDEST:
                raise StackError(
                    f"{self.root} is torch {release.text}. The stack is for 2.13 and later: before, layouts are built "
                    "otherwise, and upstream takes no changes there."
                )
            if found:
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

    def require_python(self, path: str) -> None:
        """Raises StackError with file and line if the file, which may be absent, can't be parsed."""
        try:
            _parse(self._bytes(path) if self.exists(path) else b"", path)
        except SyntaxError as error:
            raise StackError(f"{path}:{error.lineno} isn't Python that this interpreter reads: {error.msg}") from error

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
        found = self._source(row, path).fingerprint(row.qualname)
        if found is None:
            return f"{path} defines no {row.qualname}"
        known = {modules.get(row.module, {}).get(row.qualname) for modules in versions.fingerprints().values()}
        if found not in known:
            return f"{path} defines {row.qualname} with another body than any release that the stack was written for"
        return None

    def has_it(self, row: Patch) -> bool:
        """Whether the tree brings by itself what the row would add."""
        return row.kind is Kind.ADD and "<" in row.releases and self._defines(row)

    def _defines(self, row: Patch) -> bool:
        tree = self._source(row, f"{row.module.replace('.', '/')}.py").tree
        classes = [found for found in _classes(tree) if found.name == row.owner] if tree else []
        return any(isinstance(n, ast.FunctionDef) and n.name == row.name for c in classes for n in c.body)

    def _source(self, row: Patch, path: str) -> recognise.Source:
        return _source_of(row.module, path, self._bytes(path))


_parse = functools.lru_cache(maxsize=64)(ast.parse)  # each prefix asks


@functools.lru_cache(maxsize=64)  # each row asks, and each prefix
def _source_of(module: str, path: str, text: bytes) -> recognise.Source:
    source = recognise.Source(module, path)
    source.__dict__["text"] = text  # read already, and from where the tree is
    return source


def write(root: pathlib.Path, files: dict[str, str | None]) -> None:
    """Put these texts into a folder, None for a file that goes; all or, if one can't be written, none."""
    before = {path: (root / path).read_bytes() if (root / path).is_file() else None for path in files}
    done: list[str] = []
    try:
        for path, text in files.items():
            _put(root / path, None if text is None else text.encode())
            done.append(path)
    except OSError as error:
        for written in done:
            _put(root / written, before[written])
        raise StackError(f"{path} can't be written ({error}); nothing was changed") from error


def _put(path: pathlib.Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".new")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@functools.lru_cache(maxsize=64)  # by identity; each prefix asks the same trees
def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
