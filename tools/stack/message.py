"""One patch of the stack: its message, what it carries, and what it owes to upstream's rules."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
PATCHES = ROOT / "patches"


class StackError(Exception):
    """The stack can't be rendered; the message names the file, the function and the reason."""


@dataclass(frozen=True)
class Debt:
    """Breaches of one rule that a patch still has, just so many, and why."""

    rule: str
    count: int
    reason: str


@dataclass(frozen=True)
class PatchMessage:
    """What `patches/NAME.md` says.

    Attributes:
        name: as `patches/series` lists it.
        title: the first line of the commit, with upstream's tag.
        rows: targets of the overlay's rows, ``module:qualname``, that the patch lays down.
        tests: our test files, and what they need beside them, that travel with the patch.
        body: the rest of the commit message.
        files: new files of ours that the patch brings whoever imports them, by their paths under torch/distributed.
        size: why the patch is larger than patches should be; empty if it isn't.
        owes: breaches of upstream's rules that it still has.
        removes: methods of torch's that go, ``module:qualname``, since nothing calls them any more.
        line: at which line of the file the body begins.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    tests: tuple[str, ...]
    body: str
    files: tuple[str, ...] = ()
    size: str = ""
    owes: tuple[Debt, ...] = ()
    line: int = 1
    removes: tuple[str, ...] = ()


def read_series(folder: pathlib.Path = PATCHES) -> list[PatchMessage]:
    """The patches in their order. Raises StackError for a file that lacks what a patch needs."""
    lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    return [read_message(folder / f"{line.strip()}.md") for line in lines if line.strip() and line[0] != "#"]


def read_message(path: pathlib.Path) -> PatchMessage:
    """A head of fields, of which ``Module:`` has names in the lines below it; an empty line; the message."""
    head, _, body = path.read_text(encoding="utf-8").partition("\n\n")
    fields: dict[str, list[str]] = {
        name: [] for name in ("Title", "Module", "Tests", "Files", "Size", "Owes", "Removes")
    }
    rows: list[str] = []
    for number, line in enumerate(head.splitlines(), 1):
        field, colon, value = line.partition(":")
        if field in fields and colon:
            fields[field].append(value.strip())
        elif line.startswith(" ") and fields["Module"]:
            rows += [f"{fields['Module'][-1]}:{name}" for name in line.split()]
        else:
            known = ", ".join(f"'{name}:'" for name in fields)
            raise StackError(f"{path.name}:{number}: needs one of {known}, or indented names: {line!r}")
    title = "".join(fields["Title"])
    if not title.startswith("[") or not body.strip():
        raise StackError(f"{path.name} needs a Title that begins with its tag, and a message")
    return PatchMessage(
        path.stem,
        title,
        tuple(rows),
        tuple(" ".join(fields["Tests"]).split()),
        body.strip() + "\n",
        tuple(" ".join(fields["Files"]).split()),
        " ".join(fields["Size"]),
        tuple(_debt(path.name, value) for value in fields["Owes"]),
        len(head.splitlines()) + 2,
        tuple(" ".join(fields["Removes"]).split()),
    )


def _debt(file: str, value: str) -> Debt:
    rule, count, reason = (*value.split(None, 2), "", "", "")[:3]
    if not count.isdigit() or not reason:
        raise StackError(f"{file}: 'Owes:' takes a rule, how many breaches, and why: {value!r}")
    return Debt(rule, int(count), reason)
