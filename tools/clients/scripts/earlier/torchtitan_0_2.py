"""torchtitan 0.2: the meshes of its ParallelDims with context and expert parallelism, and its clipping.

torchtitan asks torch for an accelerator and takes CUDA where there is none; its one word for that is set to the CPU.
"""

from __future__ import annotations

import torch.distributed as dist
from clients import small
from clients.inside import Session
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_

DEGREES = dict(dp_replicate=1, dp_shard=2, cp=2, tp=2, pp=1, ep=4, etp=1)
FLATTENED = ("dp", "dp_shard_cp", "dp_cp", "ep")  # by 0.2.0, whose meshes are slices of one with experts in it


def views(dims: ParallelDims, world: DeviceMesh) -> dict[str, DeviceMesh]:
    """Every mesh of one axis."""
    if hasattr(dims, "get_all_one_dimensional_meshes"):
        return dims.get_all_one_dimensional_meshes()
    return {name: world[name] for name in (*world.mesh_dim_names, *FLATTENED)}


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"
    dims = ParallelDims(**DEGREES, world_size=session.size)
    meshes = views(dims, session.phase("build_mesh", dims.build_mesh))
    fsdp = meshes["fsdp" if "fsdp" in meshes else "dp_shard_cp"]
    small.train_twice(session, small.build(meshes["tp"], fsdp), fsdp, clip_grad_norm_)
    session.keep("ranks of every mesh", {name: mesh.mesh for name, mesh in meshes.items()})
    session.close()


if __name__ == "__main__":
    main()
