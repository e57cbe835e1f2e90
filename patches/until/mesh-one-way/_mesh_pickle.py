"""Before groups are shared by default: of a mesh that shares none, new_group sorts the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from ._settings import get_settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._view import View


def _group_ranks(mesh: DeviceMesh, axis: View) -> list[int]:
    """The ranks of the group of an axis, in the group's order."""
    ranks = axis.ranks(mesh._rank)
    return ranks if mesh._preserve_rank_order or get_settings().share_groups != "off" else sorted(ranks)


def _open(ranks: list[int]) -> dict[str, str]:
    """The open groups over these ranks, what each is for by its name: those of meshes in this order, and others in
    whatever order the user gave them."""
    books, found = distributed_c10d._world, {}
    for group, name in books.pg_names.items():
        held, text = list(books.pg_group_ranks[group]), getattr(group, "group_desc", "")
        if held == ranks or (not text.startswith("mesh_") and sorted(held) == sorted(ranks)):
            found[name] = text
    return found
