"""One training step of the demo, the same lines on stock torch and under the overlay."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from torch_overlay.demo.config import Config
from torch_overlay.demo.experts import Experts
from torch_overlay.demo.meshes import Meshes
from torch_overlay.demo.model import build_model, byte_loss
from torch_overlay.demo.sharding import shard_model
from torch_overlay.demo.text import Text


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, config: Config, meshes: Meshes) -> None:
        self.config = config
        self.meshes = meshes
        self.text = Text(config.text_bytes, least=config.seq + 1)
        self.model = build_model(config)
        shard_model(self.model, meshes)
        self.dense, self.sparse = split_parameters(self.model)
        # One call of the fused kernel takes the tensors of one mesh only, hence two groups of parameters.
        groups = [{"params": params} for params in (self.dense, self.sparse) if params]
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
        config = self.config
        inputs, targets = self.text.batch(step, config.batch, config.seq, config.seed)
        share = config.batch // config.dp
        mine = slice(self.meshes.loss.get_local_rank() * share, (self.meshes.loss.get_local_rank() + 1) * share)
        loss = byte_loss(self.model, inputs[mine], targets[mine])
        loss = loss / self.meshes.loss.size()
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss, group=self.meshes.loss.get_group())
        return loss

    def clip(self) -> None:
        """Scale the gradients down to norm `config.clip`, over dense weights and experts together."""
        parts = [gradients(params) for params in (self.dense, self.sparse) if params]
        norms = [whole(nn.utils.get_total_norm(grads, foreach=True)) for grads in parts]
        total = torch.linalg.vector_norm(torch.stack(norms))
        for params in (self.dense, self.sparse):
            nn.utils.clip_grads_with_norm_(params, self.config.clip, total, foreach=True)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Every weight, whole, on every rank: what a checkpoint for inference holds."""
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(dense, experts'): the two live on different meshes."""
    sparse = [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]
    theirs = {id(p) for p in sparse}
    return [p for p in model.parameters() if id(p) not in theirs], sparse


def gradients(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
