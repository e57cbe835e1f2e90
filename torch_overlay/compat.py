"""What differs between releases. Bodies under `distributed/` are written for the newest and don't ask.

A release that lacks a function which they call gets one: a row of the series with `Kind.ADD` and the releases that it
is for. What must agree with the very release that runs, and so never goes upstream, is here.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .distributed._mesh_state import shared_state, view_of


class _DeviceMesh:
    """Never instantiated: its methods are set on torch's DeviceMesh."""

    def __hash__(self: DeviceMesh) -> int:
        """As torch hashes an equal mesh, which may be in a dict since before enable(); from its ranks as a tuple."""
        if self._hash is None:
            ranks = _Hashed(view_of(self).rank_map.ranks_hash)
            key: tuple[Any, ...] = (ranks, self._layout, self._device_type, self._mesh_dim_names, self._thread_id)
            if shared_state(self).private is not None:
                key = (*key, shared_state(self).private)
            self._hash = hash((*key, self._preserve_rank_order) if ORDER_IS_HASHED else key)
        return self._hash


class _Hashed:
    """Stands in a key for a value of which only the hash is at hand."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self.value


# Since 2.15 the order of the ranks in groups is a part of a mesh's value.
ORDER_IS_HASHED = "_preserve_rank_order" in DeviceMesh.__annotations__


def shards_become_terms() -> bool:
    """Whether torch has a step from a shard to a term of a sum; since 2.14."""
    from torch.distributed.tensor.placement_types import Shard

    return hasattr(Shard, "_to_partial_tensor")
