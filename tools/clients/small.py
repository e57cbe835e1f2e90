"""A model of a few thousand weights that FSDP2 and TP cut in two, for the clients that bring a mesh and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .inside import Session

WIDTH, STEPS = 64, 3
MAX_NORM = 0.01  # far below any norm of this model, so that clipping scales every gradient


def whole(blocks: int = 2) -> nn.Sequential:
    """Linears in pairs without a bias; the same weights on every rank of one seed."""
    pairs = (((WIDTH, 128), (128, WIDTH)) for _ in range(blocks))
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in pair)) for pair in pairs))


def build(tp: DeviceMesh, fsdp: DeviceMesh, blocks: int = 2) -> nn.Module:
    """The whole, cut over tp, then over fsdp."""
    model = whole(blocks)
    for block in model:
        parallelize_module(block, tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(block, mesh=fsdp)
    return fully_shard(model, mesh=fsdp)


def train(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, part: int, **calls: Any) -> None:
    """Some steps on this rank's part of four; keyword arguments as of `_step`."""
    for batch in torch.randn(STEPS, 4, 8, WIDTH)[:, part]:
        _step(session, model, optimizer, batch, **calls)


def train_twice(
    session: Session,
    model: nn.Module,
    mesh: DeviceMesh,
    clip_norm: Callable[[Iterable[torch.Tensor], float], torch.Tensor],
) -> None:
    """AdamW without clipping, then with the client's; the weights after each are kept. ``mesh`` cuts the batch."""
    optimizer, part = torch.optim.AdamW(model.parameters(), lr=1e-2), mesh.get_local_rank()
    train(session, model, optimizer, part)
    session.keep("weights", model.state_dict())
    train(session, model, optimizer, part, clip=lambda: clip_norm(model.parameters(), MAX_NORM))
    session.keep("weights after clipping", model.state_dict())


def _step(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    clip: Callable[[], torch.Tensor] | None = None,
    phase: str = "optimizer's step",
) -> None:
    """Forward, backward, the client's clipping if it has one, and the optimizer."""
    loss = model(batch).square().mean()
    loss.backward()
    session.loss(loss)
    if clip:
        session.loss(session.phase("clip the norm of the gradient", clip))
    session.phase(phase, optimizer.step)
    optimizer.zero_grad()
