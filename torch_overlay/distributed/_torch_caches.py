"""What is kept of meshes between two operations on DTensors."""

from __future__ import annotations

from torch import _C


def clear_sharding_caches() -> None:
    """Empty them. Those of C++ and of the propagator are one for each thread, and this thread's are meant; they would
    give the same again, and so would the others."""
    from torch.distributed.tensor import _collective_utils, _redistribute  # they need meshes, and so this file
    from torch.distributed.tensor._api import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    propagator._propagate_tensor_meta_cached.cache_clear()
    _C._clear_DTensor_sharding_propagator_cache()  # type: ignore[attr-defined]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
