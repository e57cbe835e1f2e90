"""torch.optim.Muon on weights that FSDP2 and TP cut in two: its orthogonalisation is matrix products in bfloat16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from clients import small
from clients.inside import Session
from torch.distributed.device_mesh import init_device_mesh

BLOCKS, RATE = 3, 1e-2


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = small.build(mesh["tp"], mesh["dp"], BLOCKS)
    optimizer = torch.optim.Muon(model.parameters(), lr=RATE)
    small.train(session, model, optimizer, mesh.get_local_rank("dp"), phase="Muon's step")
    session.keep("weights", model.state_dict())
    pairs = zip(model.parameters(), alone(), strict=True)
    session.number("largest difference from one process", max(distance(ours, one) for ours, one in pairs))
    session.close()


def alone() -> list[torch.Tensor]:
    """The weights after the same steps on whole tensors, in this process: no collective, so no side can differ."""
    torch.manual_seed(0)
    model = small.whole(BLOCKS)
    optimizer = torch.optim.Muon(model.parameters(), lr=RATE)
    for batch in torch.randn(small.STEPS, 4, 8, small.WIDTH):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def distance(ours: torch.Tensor, one: torch.Tensor) -> float:
    return (ours.full_tensor() - one).abs().max().item()


if __name__ == "__main__":
    main()
