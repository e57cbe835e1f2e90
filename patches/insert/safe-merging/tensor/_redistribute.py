"""One cut over a flattened mesh is sure to be the nested cuts only if each of them is even."""

from __future__ import annotations


def _optimize_transform_infos():
    def try_create_flattened(infos):
        del tensor_dim_size, effective_shard_mesh_size
        earlier = transform_infos[:i]  # the group that is tried begins at i
        if comm_type != "all_reduce" and not _cuts_evenly(infos, earlier, device_mesh):
            return None, "uneven_tensor_shape"
        src = ...
