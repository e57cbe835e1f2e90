"""NeMo Automodel 0.3 to 0.5: meshes for FSDP2 with experts and for Megatron-FSDP, after its own patches of torch."""

from __future__ import annotations

import torch.distributed as dist
from clients.inside import Session
from nemo_automodel.components.distributed.config import FSDP2Config, MegatronFSDPConfig
from nemo_automodel.components.distributed.mesh_utils import create_device_mesh
from nemo_automodel.shared.torch_patches import apply_torch_patches


def main() -> None:
    apply_torch_patches()
    session = Session()
    dist.init_process_group("gloo")
    degrees = dict(dp_replicate_size=2, tp_size=2, ep_size=4, world_size=session.size)
    dense, experts = session.phase("FSDP2", lambda: create_device_mesh(FSDP2Config(backend="gloo"), **degrees))
    session.keep("meshes", {"dense": dense.mesh, "experts": experts.mesh})
    session.keep("flattened", {name: dense[name].mesh for name in ("dp", "dp_shard_cp", "dp_cp", "tp", "cp")})
    session.keep("sliced", {"dp": dense["dp_replicate", "dp_shard_cp"].mesh})  # as its parallelizer does
    degrees = dict(tp_size=2, cp_size=2, world_size=session.size)
    config = MegatronFSDPConfig(backend="gloo")
    mesh, _ = session.phase("Megatron-FSDP", lambda: create_device_mesh(config, **degrees))
    session.keep("Megatron-FSDP", {"root": mesh.mesh, "dp_cp": mesh["dp_cp"].mesh})
    session.close()


if __name__ == "__main__":
    main()
