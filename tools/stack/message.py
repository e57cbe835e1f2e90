"""The series of patches: what each brings, and what it says."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
PATCHES = ROOT / "patches"
FIELDS = ("Title", "Module", "Files", "Removes", "Tests")


class StackError(Exception):
    """The stack can't be rendered; the message names the file, the function and the reason."""


@dataclass(frozen=True)
class PatchMessage:
    name: str  # as `patches/series` lists it
    stack: str  # under which heading it stands there
    title: str  # the first line of the commit, with upstream's tag
    rows: tuple[str, ...]  # targets of the overlay's table, ``module:qualname``, that the patch lays down
    files: tuple[str, ...]  # new files of ours, whole, by their paths under torch/distributed
    removes: tuple[str, ...]  # methods of torch's that go, ``module:qualname``, since nothing calls them any more
    # our test files under test/stack, each as it lands under upstream's test/distributed, or with ``=`` and the
    # file of upstream's there that it extends
    tests: tuple[str, ...]
    body: str  # the rest of the commit message
    line: int = 1  # at which line of the file the body begins


def read_series() -> list[PatchMessage]:
    """The patches in their order. Raises StackError for a file that lacks what a patch needs."""
    messages, stack = [], ""
    for line in (PATCHES / "series").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            stack = line.strip("[] ")
        elif line.strip() and line[0] != "#":
            messages.append(read_message(PATCHES / f"{line.strip()}.md", stack))
    return messages


def read_message(path: pathlib.Path, stack: str = "") -> PatchMessage:
    """A head of fields, of which ``Module:`` has names in the lines below it; an empty line; the message."""
    head, _, body = path.read_text(encoding="utf-8").partition("\n\n")
    fields: dict[str, list[str]] = {name: [] for name in FIELDS}
    rows: list[str] = []
    last = ""
    for number, line in enumerate(head.splitlines(), 1):
        field, colon, value = line.partition(":")
        if field in fields and colon:
            fields[field].append(value.strip())
            last = field
        elif line.startswith(" ") and last == "Module":
            rows += [f"{fields['Module'][-1]}:{name}" for name in line.split()]
        elif line.startswith(" ") and last:
            fields[last][-1] += f" {line.strip()}"
        else:
            known = ", ".join(f"'{name}:'" for name in fields)
            raise StackError(f"{path.name}:{number}: needs one of {known}, or indented names: {line!r}")
    title = "".join(fields["Title"])
    if not title.startswith("[") or not body.strip():
        raise StackError(f"{path.name} needs a Title that begins with its tag, and a message")
    words = {name: tuple(" ".join(values).split()) for name, values in fields.items()}
    return PatchMessage(
        path.stem,
        stack,
        title,
        tuple(rows),
        words["Files"],
        words["Removes"],
        words["Tests"],
        body.strip() + "\n",
        len(head.splitlines()) + 2,
    )
