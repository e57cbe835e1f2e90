"""Names of groups are strings in more than one place."""

from __future__ import annotations

from typing import Any


class DeviceMesh:
    _dim_group_names: Any
    _root_mesh = ...
