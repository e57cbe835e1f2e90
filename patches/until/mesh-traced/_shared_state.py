"""Before compiled code makes views."""

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
        private: what tells a private universe from its equals, a part of its meshes' value; None if it isn't private.
        universe: its groups in this world; None before the first request, see `universe_of`.
        saved_number: of a loaded mesh, which universe over these ranks it was saved from.
        remembered: what redistributions over its meshes found out; freed with the last mesh of the universe.
    """

    def __init__(self, rank_map: RankMap, private: str | None = None) -> None:
        self.rank_map = rank_map
        self.flattened: dict[str, DeviceMesh] = {}
        self.registry: dict[str, ProcessGroup] = {}
        self.private = private
        self.universe: Universe | None = None
        self.saved_number: int | None = None
        self.remembered = Remembered()
        self._tensor: torch.Tensor | None = None
        self._ranks: tuple[int, ...] | None = None


TracedViews = ...
