"""Before groups are shared by default: of a mesh that shares none, new_group sorts the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._settings import get_settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._view import View


def _group_ranks(mesh: DeviceMesh, axis: View) -> list[int]:
    """The ranks of the group of an axis, in the group's order."""
    ranks = axis.ranks(mesh._rank)
    return ranks if mesh._preserve_rank_order or get_settings().share_groups != "off" else sorted(ranks)
