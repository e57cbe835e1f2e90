"""accelerate: the mesh of its ParallelismConfig, dp_shard 4 and tp 2, with a model on it.

The mesh is accelerate's; the calls of FSDP2 are torch's, since an Accelerator takes FSDP2 on no CPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from clients import small
from clients.inside import REPEATS, Session
from torch import nn


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    degrees = ParallelismConfig(dp_shard_size=4, tp_size=2)
    mesh = session.phase("build_device_mesh", lambda: degrees.build_device_mesh("cpu"))
    model = small.build(mesh["tp"], mesh[tuple(degrees.fsdp_dim_names)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def clip() -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), small.MAX_NORM).full_tensor()

    small.train(session, model, optimizer, mesh.get_local_rank("dp_shard"))
    session.keep("weights", model.state_dict())
    session.phase("full_tensor of every weight", lambda: [w.full_tensor() for w in model.parameters()], REPEATS)
    small.train(session, model, optimizer, mesh.get_local_rank("dp_shard"), clip=clip)
    session.keep("weights after clipping", model.state_dict())
    session.close()


if __name__ == "__main__":
    main()
