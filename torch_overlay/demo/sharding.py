"""Spreads the demo's model over its meshes: tensor parallelism, expert parallelism, then FSDP2 around both."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_overlay.demo.experts import MixtureOfExperts
from torch_overlay.demo.meshes import Meshes
from torch_overlay.demo.model import Block, Transformer


def shard_model(model: Transformer, meshes: Meshes) -> None:
    """Shard in place. Between blocks a rank holds its share of the sequence, (batch, seq / tp, width)."""
    _apply_tensor_parallel(model, meshes)
    for block in model.blocks:
        if isinstance(block.mixer, MixtureOfExperts):
            _apply_expert_parallel(block.mixer, meshes)
    _apply_fsdp(model, meshes)


def _apply_tensor_parallel(model: Transformer, meshes: Meshes) -> None:
    tp = meshes.dense["tp"]
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        parallelize_module(block, tp, _block_plan(block))


def _block_plan(block: Block) -> dict:
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**gathered),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mixer_norm": SequenceParallel(use_local_output=True),
    }
    if isinstance(block.mixer, MixtureOfExperts):
        # The router sees this rank's tokens; its weight's gradient is summed over tp like a norm's.
        return plan | {"mixer.router": SequenceParallel(sequence_dim=0, use_local_output=True)}
    return plan | {
        "mixer": PrepareModuleInput(**gathered),
        "mixer.up": ColwiseParallel(),
        "mixer.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def _apply_expert_parallel(mixture: MixtureOfExperts, meshes: Meshes) -> None:
    ep = meshes.sparse["ep"]
    for name, weight in list(mixture.experts.named_parameters()):
        # Every rank drew the same weights, so each takes its part without asking.
        spread = distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)
        setattr(mixture.experts, name, nn.Parameter(spread))
    mixture.group = ep.get_group()


def _apply_fsdp(model: Transformer, meshes: Meshes) -> None:
    """FSDP2 only adds gradients up; the trainer divides the loss instead.

    FSDP2 would divide an expert's gradient by the ranks of its own mesh, but tokens of other ranks came to it over ep.
    A divisor of our own would be applied twice where efsdp is 1 (torch 2.13 to 2.15, with the sum that gloo needs).
    """
    for block in model.blocks:
        if isinstance(block.mixer, MixtureOfExperts):
            experts = block.mixer.experts
            # Their dim 0 is spread over ep already, and may be too short to be cut again.
            fully_shard(experts, mesh=meshes.sparse_shards, shard_placement_fn=lambda _: Shard(1))
        fully_shard(block, mesh=meshes.dense_shards)
    fully_shard(model, mesh=meshes.dense_shards)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction
