"""Before a rank outside a mesh knows the backends of its axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._group_table import Entry
    from ._universe import Universe


def _note_override(universe: Universe, request: Request, mine: Entry | None) -> None:
    """Note the backend and options of an axis, for groups over several axes, which need equal ones."""
    if mine is not None:
        universe.overrides[mine.group_name] = request.override
