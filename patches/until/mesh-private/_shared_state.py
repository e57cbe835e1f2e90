"""Before a mesh can be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ._rank_map import RankMap
    from ._universe import Universe


class SharedState(...):
    """One for a root mesh and all its views, a mesh universe.

    Attributes:
        rank_map: index to rank and back.
        flattened: the flattened views by name, the mesh's ``_flatten_mapping``; others may write it.
        registry: the groups by name, the mesh's ``_pg_registry``.
        universe: its groups in this world; None before the first request, see `universe_of`.
    """

    def __init__(self, rank_map: RankMap) -> None:
        self.rank_map = rank_map
        self.flattened: dict[str, DeviceMesh] = {}
        self.registry: dict[str, ProcessGroup] = {}
        self.universe: Universe | None = None
        self._tensor: torch.Tensor | None = None
        self._ranks: tuple[int, ...] | None = None
