"""What torch keeps of meshes between two operations on DTensors: nothing in C++ yet."""

from __future__ import annotations


def clear_sharding_caches() -> None:
    """Empty these caches; that of the propagator is one for each thread, and this thread's is meant."""
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor._api import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()  # type: ignore[attr-defined]
    propagator._propagate_tensor_meta.cache_clear()  # type: ignore[attr-defined]
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
