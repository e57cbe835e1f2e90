"""The door to the backend that torch chooses for a group of a mesh. Upstream its calls go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def chosen_backend(backend: str | None, options: Any, device_type: str, ranks: Sequence[int]) -> str | None:
    """The backend of a group over these ranks, for which the user gave this one; None is the default group's."""
    return backend
