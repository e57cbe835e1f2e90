"""What `--check` found, kept in a file: a run goes on where another ended, and runs what is another program now."""

from __future__ import annotations

import ast
import csv
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .message import PATCHES

CHECKED = PATCHES / "checked.csv"
KEY = ("release", "patch", "program")


def program(files: Mapping[str, str]) -> str:
    """A digest of what these files do: docstrings, comments and the way it is written don't count.

    It is the same on one release of Python; another may write syntax trees otherwise, and then all runs again.
    """
    digest = hashlib.sha256()
    for path, text in sorted(files.items()):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [statement for statement in body if not _is_text(statement)]  # type: ignore[attr-defined]
        digest.update(f"{path}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:16]


def _is_text(statement: ast.stmt) -> bool:
    found = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(found, ast.Constant) and isinstance(found.value, str)


@dataclass
class Record:
    """The rows of one release in the file, which holds those of all.

    Attributes:
        head: what the cells of a row are.
        patches: the names of all patches, in their order. Rows of others go when the file is written.
    """

    release: str
    head: Sequence[str]
    patches: Sequence[str]
    path: pathlib.Path = CHECKED

    def found(self, patch: str, program: str) -> list[str] | None:
        """The cells of the row in which this program was checked; None if it never was."""
        rows = [row for row in self._rows() if [row[name] for name in KEY] == [self.release, patch, program]]
        return [rows[0][name] for name in self.head] if rows else None

    def keep(self, patch: str, program: str, cells: Sequence[str]) -> None:
        """Write a row, in place of what was there of this patch and release."""
        new = dict(zip((*KEY, *self.head), (self.release, patch, program, *cells), strict=True))
        left = [row for row in self._rows() if (row["release"], row["patch"]) != (self.release, patch)]
        place = {name: number for number, name in enumerate(self.patches)}
        rows = [row for row in (*left, new) if row["patch"] in place]
        with self.path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, (*KEY, *self.head), lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: (row["release"], place[row["patch"]])))

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.is_file():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return [row for row in rows if tuple(row) == (*KEY, *self.head)]
