"""NeMo Automodel: the meshes that it builds for FSDP2 with experts, and for Megatron-FSDP."""

from __future__ import annotations

import torch.distributed as dist
from clients.inside import Session
from nemo_automodel.components.distributed.config import FSDP2Config, MegatronFSDPConfig
from nemo_automodel.components.distributed.mesh import ParallelismSizes
from nemo_automodel.components.distributed.mesh_utils import _create_device_meshes, get_flat_mesh, get_fsdp_dp_mesh


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    degrees = ParallelismSizes(dp_replicate_size=2, tp_size=2, ep_size=4)
    dense, experts = session.phase(
        "FSDP2 with experts", lambda: _create_device_meshes(FSDP2Config(), degrees, world_size=session.size)
    )
    session.keep("meshes", {"dense": dense.mesh, "experts": experts.mesh})
    session.keep(
        "flattened", {name: get_flat_mesh(dense, name).mesh for name in ("dp", "dp_shard_cp", "dp_cp", "tp", "cp")}
    )
    session.phase("get_fsdp_dp_mesh", lambda: get_fsdp_dp_mesh(dense))
    degrees = ParallelismSizes(tp_size=2, cp_size=2)
    mesh, _ = session.phase(
        "Megatron-FSDP", lambda: _create_device_meshes(MegatronFSDPConfig(), degrees, world_size=session.size)
    )
    session.keep("Megatron-FSDP", {"root": mesh.mesh, "dp_cp": get_flat_mesh(mesh, "dp_cp").mesh})
    session.close()


if __name__ == "__main__":
    main()
