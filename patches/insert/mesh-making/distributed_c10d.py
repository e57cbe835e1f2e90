"""A split's ranks count inside its parent."""

from __future__ import annotations


def split_group():
    _process_group_name(..., to_global=parent_group_to_global_ranks)
    group_name = ...
