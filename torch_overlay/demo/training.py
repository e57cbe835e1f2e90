"""One training step of the demo, the same lines on stock torch and under the overlay; its meshes and its text."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ..parallel_dims import ParallelDims, ParallelMeshes
from .model import Experts, build_model, byte_loss, shard_model
from .train import Config


def build_meshes(config: Config) -> ParallelMeshes:
    """Make the meshes. Both runs execute the same lines: `ParallelDims` runs on stock torch as it does on ours."""
    dims = ParallelDims(dp_replicate=config.dp_replicate, dp_shard=config.dp_shard, tp=config.tp, ep=config.ep)
    return dims.build(config.device)


class Text:
    """At most `limit` bytes of the standard library's top-level `*.py`, which are on every machine that runs this, in
    sorted order, and random batches of them.

    The same machine gives the same bytes to every rank; `digest` lets the caller check that.
    Raises RuntimeError if fewer than `least` bytes are found.

    >>> text = Text(limit=1000, least=100)
    >>> inputs, targets = text.batch(step=0, rows=4, length=8, seed=0)
    >>> bool((inputs[:, 1:] == targets[:, :-1]).all())  # the target of a byte is the byte that follows it
    True
    """

    def __init__(self, limit: int, least: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        self.data = b"".join([path.read_bytes() for path in sorted(folder.glob("*.py"))])[:limit]
        if len(self.data) < least:
            raise RuntimeError(f"needed {least} bytes of Python sources, found {len(self.data)} in {folder}")
        self.digest = hashlib.sha256(self.data).hexdigest()
        with torch.device("cpu"):
            self._bytes = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)

    def batch(self, step: int, rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch of a step as (inputs, targets), each (rows, length) int64; equal on every rank,
        and on the default device."""
        generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.data) - length, (rows, 1), generator=generator, device="cpu")
        window = self._bytes[starts + torch.arange(length + 1, device="cpu")].long().to(torch.get_default_device())
        return window[:, :-1], window[:, 1:]


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, config: Config, meshes: ParallelMeshes) -> None:
        self.config = config
        self.loss_mesh = meshes.loss
        self.text = Text(config.text_bytes, least=config.seq + 1)
        self.model = build_model(config)
        shard_model(self.model, meshes)
        experts = [module for module in self.model.modules() if isinstance(module, Experts)]
        sparse = [weight for module in experts for weight in module.parameters()]
        dense = [weight for weight in self.model.parameters() if all(weight is not expert for expert in sparse)]
        # The two live on different meshes. One call of the fused kernel takes the tensors of one mesh only, hence two
        # groups of parameters.
        self.weights = [weights for weights in (dense, sparse) if weights]
        groups = [{"params": weights} for weights in self.weights]
        self.optimizer = torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def step(self, step: int) -> float:
        """Train on the global batch of `step`. The loss is the mean over all its tokens, one number on every rank."""
        self.optimizer.zero_grad()
        loss = self.backward(step)
        self.clip()
        self.optimizer.step()
        return loss.item()

    def backward(self, step: int) -> torch.Tensor:
        """Add the gradients of the batch of `step`, and return its loss, both the mean over the loss axis."""
        config, readers = self.config, self.loss_mesh
        inputs, targets = self.text.batch(step, config.batch, config.seq, config.seed)
        share = config.batch // readers.size()
        mine = slice(readers.get_local_rank() * share, (readers.get_local_rank() + 1) * share)
        loss = byte_loss(self.model, inputs[mine], targets[mine]) / readers.size()
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss, group=readers.get_group())
        return loss

    def clip(self) -> None:
        """Scale the gradients down to norm `config.clip`, over dense weights and experts together."""
        grads = [[weight.grad for weight in weights if weight.grad is not None] for weights in self.weights]
        norms = [whole(nn.utils.get_total_norm(some, foreach=True)) for some in grads]
        total = torch.linalg.vector_norm(torch.stack(norms))
        for weights in self.weights:
            nn.utils.clip_grads_with_norm_(weights, self.config.clip, total, foreach=True)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Every weight, whole, on every rank: what a checkpoint for inference holds."""
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
