"""FSDP2, HSDP and tensor parallelism on views: the loss of every step is that of one process with all the data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mesh_ranks import WORLD, make_root

STEPS, BATCH, WIDTH = 3, 8, 12


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 18), nn.GELU(), nn.Linear(18, WIDTH)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(net: nn.Module, part: int = 0, parts: int = 1) -> list[float]:
    """The loss of each step, on the part-th share of every batch; gradients clipped, as trainers do."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        mine = batch(step).chunk(parts)[part]
        loss = (net(mine) - mine).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class TrainingCases:
    """Cases for ``EightRanks``."""

    def losses_agree(self, net: nn.Module, data, label: str) -> None:
        """data: the mesh whose ranks each take a share of the batch, by coordinate."""
        coordinate, part = data.get_coordinate(), 0
        for size, where in zip(data.shape, coordinate, strict=True):
            part = part * size + where
        local = torch.tensor(train(net, part, data.size()), dtype=torch.float64)
        for group in data.get_all_groups():
            dist.all_reduce(local, group=group)
        self.assertEqual((local / data.size()).tolist(), train(model()), label)

    def test_fsdp_on_slices_and_flattened_views(self):
        """One data axis: a slice, a slice of an unflattened view, two axes flattened, the world."""
        root = make_root(range(WORLD), (2, 2, 2), ("dp", "cp", "tp"))
        world = make_root(range(WORLD), (WORLD,), ("world",))
        views = {
            "slice": root["dp"],
            "flattened": root["dp", "cp"]._flatten("dp_cp"),
            "apart, flattened": root["dp", "tp"]._flatten("dp_tp"),
            "unflattened": world._unflatten(0, (4, 2), ("fsdp", "tp"))["fsdp"],
            "world": world,
        }
        for label, mesh in views.items():
            net = model()
            for layer in (net[0], net[2], net):
                fully_shard(layer, mesh=mesh)
            self.losses_agree(net, mesh, label)

    def test_hsdp_on_slices_and_flattened_views(self):
        """Replicate and shard axes: slices, a shard axis that was flattened, an unflattened view."""
        root = make_root(range(WORLD), (2, 2, 2), ("rep", "shard", "cp"))
        flat = root["shard", "cp"]._flatten("shard_cp")
        world = make_root(range(WORLD), (WORLD,), ("world",))
        views = {
            "slice": root["rep", "shard"],
            "flattened": type(root)._concatenate([root["rep"], flat]),
            "unflattened": world._unflatten(0, (2, 2, 2), ("pp", "rep", "shard"))["rep", "shard"],
        }
        for label, mesh in views.items():
            net = model()
            fully_shard(net[0], mesh=mesh)
            fully_shard(net, mesh=mesh)
            self.losses_agree(net, mesh, label)
