"""One patch of the stack: its message, and which rows of the overlay's table it carries."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
PATCHES = ROOT / "patches"


class StackError(Exception):
    """The stack can't be rendered; the message names the file, the function and the reason."""


@dataclass(frozen=True)
class PatchMessage:
    """What `patches/NAME.md` says.

    Attributes:
        name: as `patches/series` lists it.
        title: the first line of the commit, with upstream's tag.
        rows: targets of the overlay's rows, ``module:qualname``, that the patch lays down.
        tests: our test files, and what they need beside them, that travel with the patch.
        body: the rest of the commit message.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    tests: tuple[str, ...]
    body: str


def read_series(folder: pathlib.Path = PATCHES) -> list[PatchMessage]:
    """The patches in their order. Raises StackError for a file that lacks what a patch needs."""
    lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    return [read_message(folder / f"{line.strip()}.md") for line in lines if line.strip() and line[0] != "#"]


def read_message(path: pathlib.Path) -> PatchMessage:
    """A head of ``Title:``, ``Module:`` with names that follow it, and ``Tests:``; an empty line; the message."""
    head, _, body = path.read_text(encoding="utf-8").partition("\n\n")
    title, module = "", ""
    rows: list[str] = []
    tests: list[str] = []
    for number, line in enumerate(head.splitlines(), 1):
        field, colon, value = line.partition(":")
        if field == "Title" and colon:
            title = value.strip()
        elif field == "Tests" and colon:
            tests += value.split()
        elif field == "Module" and colon:
            module = value.strip()
        elif line.startswith(" ") and module:
            rows += [f"{module}:{name}" for name in line.split()]
        else:
            raise StackError(
                f"{path.name}:{number}: needs 'Title:', 'Module:' or 'Tests:', or indented names: {line!r}"
            )
    if not title.startswith("[") or not body.strip():
        raise StackError(f"{path.name} needs a Title that begins with its tag, and a message")
    return PatchMessage(path.stem, title, tuple(rows), tuple(tests), body.strip() + "\n")
