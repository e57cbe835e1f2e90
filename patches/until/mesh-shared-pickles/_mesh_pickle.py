"""Before a loaded mesh knows which groups are another mesh's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import get_world_size

from ._universe import find_universe

if TYPE_CHECKING:
    from ._rank_map import RankMap


def _find(wanted: _Wanted, rank_map: RankMap, number: int | None, private: str | None) -> str | None:
    """The name of a group over exactly these ranks.

    If the universe that the mesh was saved from is here, it is that universe's, even if it was destroyed: who asks for
    it is told so.
    """
    saved_from = find_universe(rank_map, private, number)
    if saved_from is not None and saved_from.number == number:
        name = _of_table(saved_from.table, wanted)
        if name is not None:
            return name
    return _find_elsewhere(wanted)


def _find_elsewhere(wanted: _Wanted) -> str | None:
    """The name of a live group: that of the saved name, else the default group, else the first made for a mesh."""
    fitting = _open(wanted.ranks)
    if wanted.saved_name in fitting:
        return wanted.saved_name
    if wanted.ranks == list(range(get_world_size())):
        return distributed_c10d._get_default_group().group_name
    return next((name for name, text in fitting.items() if text.startswith("mesh_")), None)
