"""A split's ranks count inside its parent."""

from __future__ import annotations


def split_group():
    _process_group_name(..., parent=parent_pg)
    group_name = ...
