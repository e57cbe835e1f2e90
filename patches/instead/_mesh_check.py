"""Upstream all ranks run one release, and the choices are settings."""

from __future__ import annotations

import dataclasses

from ._settings import get_settings


def _process() -> str:
    """What groups and plans depend on beside the meshes, as one line."""
    settings = get_settings()
    return ", ".join(f"{field.name}={getattr(settings, field.name)!r}" for field in dataclasses.fields(settings))
