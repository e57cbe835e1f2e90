"""One cut over a flattened mesh is sure to be the nested cuts only if each of them is even."""

from __future__ import annotations


def _optimize_transform_infos(shape: Sequence[int] | None = None):
    def try_create_flattened(infos):
        del tensor_dim_size, effective_shard_mesh_size
        # Merged gathers of strided shards stay an AssertionError. One by one, the greedy
        # planner's logical shapes would silently give other rows.
        strided = isinstance(first_placements[0], _StridedShard)
        if (
            comm_type != "all_reduce"
            and not strided
            and not _cuts_evenly(infos, device_mesh, transform_infos[:i], src_placements, shape)
        ):
            return None, "uneven_tensor_shape"
        src = ...

    def try_create_flattened(infos):
        if len({info.src_dst_placements[0] for info in infos}) > 1:
            merged_src = Partial("sum")  # also where averages are over mesh dims of size 1
        merged_placements = ...


def redistribute_local_tensor():
    _optimize_transform_infos(..., shape=current_spec.shape)
    debug_mode = ...
