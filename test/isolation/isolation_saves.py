"""Cases with checkpoints that are written in the background, on the default group, as `dcp.async_save` does."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from isolation_cases import square
from isolation_tools import JOIN_SECONDS, shared_folder

STEPS, SAVE_EVERY, WIDTH = 24, 4, 16
METRICS = 3  # logged each step


def training_beside_saves(rank: int, world_size: int) -> None:
    """FSDP2 x TP: the losses are those of a run without saves, and each checkpoint holds what was saved."""
    mesh = square()
    expected = train(mesh, None)
    with shared_folder() as folder:
        losses = train(mesh, folder)
    assert all(math.isfinite(loss) for loss in losses), losses
    assert losses == expected, f"{losses} with saves, {expected} without"
    everybody: list = [None] * world_size
    dist.all_gather_object(everybody, losses)
    assert everybody == [losses] * world_size, everybody


def train(mesh: DeviceMesh, folder: str | None) -> list[float]:
    """The mean loss of each step over all ranks, which train on the shares of their dp coordinate."""
    net = sharded_model(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses, saving, saved = [], None, {}
    for step in range(STEPS):
        if folder and step % SAVE_EVERY == 0:
            if saving:
                saving.result(JOIN_SECONDS)
            saved = {name: value.to_local().clone() for name, value in net.state_dict().items()}
            saving = dcp.async_save({"net": net.state_dict()}, checkpoint_id=os.path.join(folder, str(step)))
            last = step
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = data.chunk(2)[mesh.get_local_rank("dp")]
        loss = (net(mine) - mine).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [mean(mesh, metric) for metric in [loss.detach()] * METRICS]
    if saving:
        saving.result(JOIN_SECONDS)
        read_back(net, os.path.join(folder, str(last)), saved)
    return losses


def mean(mesh: DeviceMesh, metric: torch.Tensor) -> float:
    """Over both axes, as trainers log it."""
    return DTensor.from_local(metric, mesh, [Partial("avg")] * 2, run_check=False).full_tensor().item()


def sharded_model(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)).double()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh["dp"])
    return net


def read_back(net: nn.Module, checkpoint: str, saved: dict[str, torch.Tensor]) -> None:
    """The checkpoint has the shards of this rank as they were when it was saved."""
    loaded = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    dcp.load({"net": loaded}, checkpoint_id=checkpoint)
    for name, value in loaded.items():
        assert torch.equal(value.to_local(), saved[name]), name
