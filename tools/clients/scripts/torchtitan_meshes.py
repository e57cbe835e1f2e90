"""torchtitan: the meshes of its ParallelDims with context and expert parallelism, its clipping and its loss's mean.

torchtitan asks torch for an accelerator and takes CUDA where there is none; its one word for that is set to the CPU.
"""

from __future__ import annotations

import torch.distributed as dist
from clients import small
from clients.inside import Session
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_

DEGREES = dict(dp_replicate=1, dp_shard=2, cp=2, tp=2, pp=1, ep=4)


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"
    dims = ParallelDims(**DEGREES, world_size=session.size, spmd_backend="partial_dtensor")
    session.phase("build_mesh", dims.build_mesh)
    fsdp = dims.get_mesh("fsdp")
    small.train_twice(session, small.build(dims.get_mesh("tp"), fsdp), fsdp, clip_grad_norm_)
    meshes = {name: mesh.mesh for name, mesh in dims.get_all_one_dimensional_meshes().items()}
    session.keep("ranks of every mesh", meshes)
    session.close()


if __name__ == "__main__":
    main()
