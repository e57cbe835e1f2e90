"""The constructor has it set for it, so it declares it no longer."""

from __future__ import annotations

from typing import Any


class DeviceMesh:
    _dim_group_names: Any
    _root_mesh = ...
