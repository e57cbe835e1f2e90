"""Before it is asked whether a tensor shares its plan with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def _guard_plan(trace: Trace, parts: Sequence[int]) -> None:
    """Ask for guards where other sizes, multiples of these parts, would have another plan."""
    _guard_elements(trace, parts)


_kinds_differ = ...
_guard_kind = ...
