"""Before anybody asks for the backend and options of an axis."""

from __future__ import annotations

_note_override = ...
