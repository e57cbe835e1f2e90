"""The stack as files that ``git am`` takes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from .history import text_of
from .message import PatchMessage

DATE = "Thu, 1 Jan 2026 00:00:00 +0000"  # the same on every rendering


def mail(
    message: PatchMessage,
    author: str,
    number: int,
    count: int,
    before: Mapping[str, str | None],
    after: Mapping[str, str],
) -> str:
    """One patch: its message and the difference between two states of its files (None: not there).

    Args:
        author: ``Name <address>``.
    """
    title, _, body = text_of(message).partition("\n")
    lines = [
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001",
        f"From: {author}",
        f"Date: {DATE}",
        f"Subject: [PATCH {number}/{count}] {title}",
        body.rstrip(),
        "---",
        "",
    ]
    text = "\n".join(lines)
    for path in sorted(after):
        text += _difference(path, before.get(path), after[path])
    return text + "-- \n"


def _difference(path: str, old: str | None, new: str) -> str:
    if old == new:
        return ""
    head = f"diff --git a/{path} b/{path}\n"
    if old is None:
        head += "new file mode 100644\n"
    name = "/dev/null" if old is None else f"a/{path}"
    lines = difflib.unified_diff((old or "").splitlines(True), new.splitlines(True), name, f"b/{path}")
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
