"""A byte-level transformer with experts, spread by tensor parallelism, expert parallelism, then FSDP2 around both."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_overlay.parallel_dims import ParallelDims, ParallelMeshes

BYTES = 256


@dataclass(frozen=True)
class Config:
    """Degrees count ranks, and experts spread over `ep` of the `dp_shard * tp` ranks of one replica. Sizes count
    elements, `batch` sequences of a global step, `seq` tokens."""

    dp_replicate: int = 1
    dp_shard: int = 2
    tp: int = 2
    ep: int = 2
    width: int = 64
    heads: int = 4
    layers: int = 2
    experts: int = 4
    top_k: int = 2
    seq: int = 64
    batch: int = 16
    seed: int = 0
    text_bytes: int = 1_000_000
    dtype: str = "float32"
    device: str = "cpu"


class Attention(nn.Module):
    """Causal self-attention. The number of heads is read off the projections, so a rank may hold some of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, heads * head_width) to (batch, heads, seq, head_width)."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864), shape (batch, heads, seq, head_width) in and out.

    Pair i of the head's elements turns by the position times a speed of its own, so that the product of a query and a
    key depends on how far apart they are.
    """
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1) * speed
    left, right = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Experts(nn.Module):
    """A stack of two-layer networks, weights (experts, width, hidden) and (experts, hidden, width).

    Under expert parallelism the weights are DTensors, Shard(0) over ep; a rank computes with its own experts only.
    """

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Apply expert i to the i-th run of `counts[i]` rows of `tokens`, (rows, width) in and out."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        runs = tokens.split(counts)
        return torch.cat([F.gelu(run @ up[i]) @ down[i] for i, run in enumerate(runs)])


class MixtureOfExperts(nn.Module):
    """Each token goes to its `top_k` experts of `count`.

    No token is ever dropped, so where the experts live changes no result.
    `group` is the ep axis' group, set when the experts are spread over it; None computes all experts here.
    """

    def __init__(self, count: int, top_k: int, width: int, hidden: int) -> None:
        super().__init__()
        self.count = count
        self.top_k = top_k
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, hidden)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same shape; on each rank its own tokens."""
        tokens = x.reshape(-1, x.shape[-1])
        odds = F.softmax(self.router(tokens), dim=-1)
        weights, chosen = odds.topk(self.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)  # pairs (token, choice), sorted by expert
        source = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        answers = self._ask_experts(tokens[source], counts)
        weighted = answers * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, source, weighted).reshape(x.shape)

    def _ask_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Experts' answers for `rows`, which are sorted by expert with `counts` rows each."""
        if self.group is None:
            return self.experts(rows, counts.tolist())
        size = self.group.size()
        arriving = all_to_all_single(counts, None, None, self.group).reshape(size, -1)  # (from rank, my expert)
        sends = counts.reshape(size, -1).sum(1).tolist()
        receives = arriving.sum(1).tolist()
        received = all_to_all_single_autograd(rows, receives, sends, self.group)
        mine = torch.arange(arriving.shape[1]).repeat(size).repeat_interleave(arriving.flatten())
        by_expert = mine.argsort(stable=True)
        answers = self.experts(received[by_expert], arriving.sum(0).tolist())
        by_rank = answers[by_expert.argsort()]
        return all_to_all_single_autograd(by_rank, sends, receives, self.group)


class TransformerBlock(nn.Module):
    def __init__(self, config: Config, sparse: bool) -> None:
        super().__init__()
        width = config.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, config.heads)
        self.mixer_norm = nn.LayerNorm(width, bias=False)
        self.mixer: MixtureOfExperts | FeedForward
        if sparse:
            self.mixer = MixtureOfExperts(config.experts, config.top_k, width, 2 * width)
        else:
            self.mixer = FeedForward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixer(self.mixer_norm(x))


class Transformer(nn.Module):
    """Bytes (batch, seq) to logits (batch, seq, 256)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config, sparse=i % 2 == 1) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(config: Config) -> Transformer:
    """The whole model on this process, with the same weights on every rank."""
    torch.manual_seed(config.seed)
    return Transformer(config).to(getattr(torch, config.dtype))


def byte_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats a byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# --- spread over meshes ---


def shard_model(model: Transformer, meshes: ParallelMeshes) -> None:
    """Shard in place. Between blocks a rank holds its share of the sequence, (batch, seq / tp, width)."""
    tp = meshes.dense["tp"]
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        parallelize_module(block, tp, _block_plan(block))
    for block in model.blocks:
        if isinstance(block.mixer, MixtureOfExperts):
            _apply_expert_parallel(block.mixer, meshes.sparse["ep"])
    _apply_fsdp(model, meshes)


def _block_plan(block: TransformerBlock) -> dict:
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


def _apply_expert_parallel(mixture: MixtureOfExperts, ep: DeviceMesh) -> None:
    for name, weight in list(mixture.experts.named_parameters()):
        # Every rank drew the same weights, so each takes its part without asking.
        spread = distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)
        setattr(mixture.experts, name, nn.Parameter(spread))
    mixture.group = ep.get_group()


def _apply_fsdp(model: Transformer, meshes: ParallelMeshes) -> None:
    """FSDP2 only adds gradients up; the trainer divides the loss instead.

    FSDP2 would divide an expert's gradient by the ranks of its own mesh, but tokens of other ranks came to it over ep.
    A divisor of our own would be applied twice where efsdp is 1 (torch 2.13 to 2.15, with the sum that gloo needs).
    """
    replicas = ("dp_replicate",) if "dp_replicate" in meshes.enabled else ()  # two axes if there are any: HSDP
    dense, sparse = (meshes[names] for names in ((*replicas, "fsdp"), (*replicas, "efsdp")))
    for block in model.blocks:
        if isinstance(block.mixer, MixtureOfExperts):
            # Their dim 0 is spread over ep already, and may be too short to be cut again.
            fully_shard(block.mixer.experts, mesh=sparse, shard_placement_fn=lambda _: Shard(1))
        fully_shard(block, mesh=dense)
    fully_shard(model, mesh=dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction


# --- a step on one rank ---


def build_meshes(config: Config) -> ParallelMeshes:
    """Make the meshes."""
    dims = ParallelDims(dp_replicate=config.dp_replicate, dp_shard=config.dp_shard, tp=config.tp, ep=config.ep)
    return dims.build("cpu")


class Text:
    """At most `limit` bytes of the standard library's top-level `*.py`, which are on every machine that runs this, in
    sorted order, and random batches of them.

    The same machine gives the same bytes to every rank. Raises RuntimeError if fewer than `least` bytes are found.

    """

    def __init__(self, limit: int, least: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        self.data = b"".join([path.read_bytes() for path in sorted(folder.glob("*.py"))])[:limit]
        if len(self.data) < least:
            raise RuntimeError(f"needed {least} bytes of Python sources, found {len(self.data)} in {folder}")
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
    """Model and data of one rank."""

    def __init__(self, config: Config, meshes: ParallelMeshes) -> None:
        self.config = config
        self.loss_mesh = meshes.loss
        self.text = Text(config.text_bytes, least=config.seq + 1)
        self.model = build_model(config)
        shard_model(self.model, meshes)

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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
