"""Before groups over several axes are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._group_table import GroupTable


def _of_table(table: GroupTable, wanted: _Wanted) -> str | None:
    """The group over these ranks that serves an axis of this name; of several, the one of the saved name."""
    alike = [
        entry.group_name
        for key, entry in list(table.entries.items())
        if wanted.lane in entry.names and list(key.ranks) == wanted.ranks and entry.apart == wanted.apart
    ]
    return wanted.saved_name if wanted.saved_name in alike else next(iter(alike), None)
