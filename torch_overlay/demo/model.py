"""The demo's model: a byte-level transformer whose every second block has a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from torch_overlay.demo.config import Config
from torch_overlay.demo.experts import MixtureOfExperts

BYTES = 256


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


class Block(nn.Module):
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
        self.blocks = nn.ModuleList(Block(config, sparse=i % 2 == 1) for i in range(config.layers))
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
