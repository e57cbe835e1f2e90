"""The patches side by side: what each changes, for reviewers and for docs/developers/upstreaming.md."""

from __future__ import annotations

from collections.abc import Sequence

from .message import PatchMessage
from .rules import State, changes

HEAD = ("stack", "patch", "files", "added", "removed", "tests added", "rows")


def table(messages: Sequence[PatchMessage], states: Sequence[State]) -> str:
    """A line a patch: files and lines without tests, lines of tests, rows of the overlay's table; and the sums."""
    lines = []
    for message, before, after in zip(messages, states, states[1:], strict=False):
        found = changes(before, after)
        code, tests = [c for c in found if not c.is_test], [c for c in found if c.is_test]
        counts = (len(code), sum(len(c.added) for c in code), sum(c.removed for c in code))
        lines.append((message.stack, f"`{message.name}`", *counts, sum(len(c.added) for c in tests), len(message.rows)))
    sums = [sum(int(line[column]) for line in lines) for column in range(2, len(HEAD))]
    rows = [HEAD, ("---", "---", *["---:"] * (len(HEAD) - 2)), *lines, ("all", f"{len(lines)} patches", *sums)]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)


def _cell(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value
