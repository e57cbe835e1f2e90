"""One cut over a flattened mesh is sure to be the nested cuts only if each of them is even."""

from __future__ import annotations


def _optimize_transform_infos():
    def try_create_flattened(infos):
        del tensor_dim_size, effective_shard_mesh_size
        # Merged gathers of strided shards stay an AssertionError. One by one, the greedy
        # planner's logical shapes would silently give other rows.
        strided = isinstance(first_placements[0], _StridedShard)
        if comm_type != "all_reduce" and not strided and not _cuts_evenly(infos, device_mesh):
            return None, "uneven_tensor_shape"
        src = ...
