"""Megatron-FSDP: the index that it keeps of a mesh for hybrid sharding and tensor parallelism, with experts beside."""

from __future__ import annotations

import torch.distributed as dist
from clients.inside import Session
from megatron_fsdp import FSDPDistributedIndex
from torch.distributed.device_mesh import init_device_mesh

AXES = {"dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer", "tp_dim": "tp"}


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    index = session.phase("FSDPDistributedIndex", build)
    library = {" ".join(map(str, key)): mesh.mesh for key, mesh in index.mesh_library.items()}
    session.keep("meshes", library)
    session.close()


def build() -> FSDPDistributedIndex:
    """As the README of Megatron-FSDP: hybrid sharding over (dp_outer, dp_shard), and the experts' mesh."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "dp_shard", "tp"))
    hybrid = mesh[("dp_outer", "dp_shard")]._flatten("hsdp")
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_outer", "dp_shard", "tp"))
    hybrid_experts = experts[("dp_outer", "dp_shard")]._flatten("hsdp_experts")
    return FSDPDistributedIndex(
        mesh,
        **AXES,
        hybrid_fsdp_group=hybrid.get_group(),
        hybrid_fsdp_expt_group=hybrid_experts.get_group(),
        expt_device_mesh=experts,
    )


if __name__ == "__main__":
    main()
