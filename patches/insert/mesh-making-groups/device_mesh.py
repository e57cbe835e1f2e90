"""The constructor has it set for it, so it declares it no longer."""

from __future__ import annotations


class DeviceMesh:
    _dim_group_names: list[str]
    _root_mesh = ...
