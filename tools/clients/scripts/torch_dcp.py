"""FSDP2 x TP on 8 ranks by torch alone: steps with clipping, then torch.distributed.checkpoint, sharded and whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from clients import small
from clients.inside import REPEATS, Session
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    mesh = session.phase("init_device_mesh", lambda: init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")))
    model = small.build(mesh["tp"], mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    small.train(session, model, optimizer, mesh.get_local_rank("dp"))
    session.keep("weights", model.state_dict())
    checkpoints(session, model, optimizer)

    def clip() -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), small.MAX_NORM).full_tensor()

    small.train(session, model, optimizer, mesh.get_local_rank("dp"), clip=clip)
    session.keep("weights after clipping", model.state_dict())
    session.close()


def checkpoints(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save and load the shards, then the whole."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    folder = str(session.folder / "shards")
    session.phase("save shards", lambda: dcp.save(get_model_state_dict(model), checkpoint_id=folder), REPEATS)
    session.phase("load shards", lambda: dcp.load(get_model_state_dict(model), checkpoint_id=folder), REPEATS)
    full = session.phase("gather the whole model", lambda: get_model_state_dict(model, options=whole), REPEATS)
    session.phase(
        "gather the whole optimizer", lambda: get_optimizer_state_dict(model, optimizer, options=whole), REPEATS
    )
    session.keep("whole model", full)
    session.phase("load the whole model", lambda: set_model_state_dict(model, dict(full), options=spread), REPEATS)
    session.keep("weights after loading", model.state_dict())


if __name__ == "__main__":
    main()
