"""The mixture-of-experts block: route each token to its experts, wherever they live, and bring the answers back."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor import DTensor


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
        up, down = _local(self.up), _local(self.down)
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


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
