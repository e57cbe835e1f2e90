"""NeMo Automodel 0.2: the meshes that its FSDP2Manager builds, with experts, and its MegatronFSDPManager."""

from __future__ import annotations

import torch.distributed as dist
from clients.inside import Session
from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager
from nemo_automodel.components.distributed.megatron_fsdp import MegatronFSDPManager


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    world = dict(backend="gloo", world_size=session.size)
    built = session.phase("FSDP2", lambda: FSDP2Manager(dp_replicate_size=2, tp_size=2, ep_size=4, **world))
    dense = built.device_mesh
    session.keep("meshes", {"dense": dense.mesh, "experts": built.moe_mesh.mesh})
    session.keep("flattened", {name: dense[name].mesh for name in ("dp", "dp_shard_cp", "dp_cp", "tp", "cp")})
    session.keep("sliced", {"dp": dense["dp_replicate", "dp_shard_cp"].mesh})  # as its parallelizer does
    sharded = session.phase("Megatron-FSDP", lambda: MegatronFSDPManager(tp_size=2, cp_size=2, **world))
    session.keep("Megatron-FSDP", {"root": sharded.device_mesh.mesh, "dp_cp": sharded.device_mesh["dp_cp"].mesh})
    session.close()


if __name__ == "__main__":
    main()
