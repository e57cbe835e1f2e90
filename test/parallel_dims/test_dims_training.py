"""A step of a mixture of experts on eight gloo ranks, TP and EP both above 1: gradients are those of one process.

FSDP2 shards the experts over the sparse mesh and every other weight over the dense one.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import forks
import torch_overlay
from torch_overlay.parallel_dims import ParallelDims, ParallelMeshes

WIDTH, TOP = 16, 2  # and how many experts a token goes to
DIMS = {
    "tp 2, ep 2, replicas": ParallelDims(dp_replicate=2, dp_shard=2, tp=2, ep=2),
    "tp 2, ep 4 of fsdp and tp": ParallelDims(dp_shard=4, tp=2, ep=4),
    "tp 4, ep 2 inside of tp": ParallelDims(dp_shard=2, tp=4, ep=2),
    "ep over all, no efsdp": ParallelDims(dp_shard=4, tp=2, ep=8),
}


class Experts(nn.Module):
    """Expert i answers the i-th run of `counts[i]` rows. Spread over ep, a rank computes with its own experts only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(8, 2 * WIDTH, WIDTH) / 4)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return torch.cat([F.gelu(run @ up[i]) @ down[i] for i, run in enumerate(rows.split(counts))])


class Mixture(nn.Module):
    """No token is dropped, so where the experts live changes no result; with no `group`, all are here."""

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 8, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = F.softmax(self.router(tokens), dim=-1).topk(TOP, dim=-1)
        order = chosen.flatten().argsort(stable=True)  # pairs (token, choice), sorted by expert
        answers = self.ask(tokens[order // TOP], torch.bincount(chosen.flatten(), minlength=8))
        weighted = answers * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // TOP, weighted).reshape(x.shape)

    def ask(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The answers to rows that are sorted by expert."""
        if self.group is None:
            return self.experts(rows, counts.tolist())
        size = self.group.size()
        arriving = all_to_all_single(counts, None, None, self.group).reshape(size, -1)  # (from rank, my expert)
        sends, receives = counts.reshape(size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        received = all_to_all_single_autograd(rows, receives, sends, self.group)
        mine = torch.arange(arriving.shape[1]).repeat(size).repeat_interleave(arriving.flatten())
        by_expert = mine.argsort(stable=True)
        answers = self.experts(received[by_expert], arriving.sum(0).tolist())
        return all_to_all_single_autograd(answers[by_expert.argsort()], sends, receives, self.group)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.mixture, self.head = Mixture(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.gelu(self.up(x)))
        return self.head(x + self.mixture(x))


def net_and_batch() -> tuple[Net, torch.Tensor]:
    """The same on every rank."""
    torch.manual_seed(7)
    return Net().double(), torch.randn(8, 8, WIDTH, dtype=torch.float64)


def loss_of(net: Net, batch: torch.Tensor) -> torch.Tensor:
    return (net(batch) - batch).square().mean()


def spread(net: Net, meshes: ParallelMeshes) -> None:
    """In place. Between `down` and `head` a rank holds its share of the sequence, whose gradients add up over tp."""
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "mixture.router": SequenceParallel(sequence_dim=0, use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, meshes["tp"], plan)
    ep, experts = meshes["ep"], net.mixture.experts
    for name, weight in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), ep, [Shard(0)], src_data_rank=None)))
    net.mixture.group = ep.get_group()
    replicas = ("dp_replicate",) if "dp_replicate" in meshes.enabled else ()  # two axes if there are any: HSDP
    fully_shard(experts, mesh=meshes[(*replicas, "efsdp")], shard_placement_fn=lambda _: Shard(1))
    fully_shard(net, mesh=meshes[(*replicas, "fsdp")])
    for module in net.modules():
        if isinstance(module, FSDPModule):  # only adds up: tokens of other ranks than its mesh's came to an expert
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction


def step(dims: ParallelDims) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the whole gradients on one rank."""
    meshes = dims.build("cpu")
    net, batch = net_and_batch()
    spread(net, meshes)
    readers = meshes.loss
    loss = loss_of(net, batch.chunk(readers.size())[readers.get_local_rank()]) / readers.size()
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, group=readers.get_group())
    return loss, {name: weight.grad.full_tensor() for name, weight in net.named_parameters()}


def one_rank(rank: int, folder: str) -> None:
    """All dims in one world, under the overlay; then the same meshes where only their own groups exist."""
    torch.set_num_threads(1)
    torch_overlay.enable()
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), 8), rank=rank, world_size=8)
    answers = {name: step(dims) for name, dims in DIMS.items()}
    dist.barrier()
    dist.destroy_process_group()
    answers["sums"] = own_groups_only(rank, os.path.join(folder, "other"))
    torch.save(answers, os.path.join(folder, f"rank{rank}.pt"))


def own_groups_only(rank: int, file: str) -> dict[str, float]:
    """The sum of ranks over each axis, in a job whose default group can't communicate at all."""
    dist.init_process_group("fake", store=dist.FileStore(file, 8), rank=rank, world_size=8)
    dims = ParallelDims(pp=2, dp_shard=2, tp=2, ep=2).build("cpu", world_group=False, backend="gloo")
    sums = {}
    for axis in dims.axes:
        number = torch.tensor(float(rank))
        dist.all_reduce(number, group=dims[axis].get_group())
        sums[axis] = number.item()
    dist.destroy_process_group()
    return sums


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[dict]:
    """What each of the eight ranks computed."""
    folder = str(tmp_path_factory.mktemp("training"))
    processes = [forks.context().Process(target=one_rank, args=(rank, folder), daemon=True) for rank in range(8)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(250)
        assert [process.exitcode for process in processes] == [0] * 8
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [torch.load(os.path.join(folder, f"rank{rank}.pt")) for rank in range(8)]


@pytest.mark.parametrize("name", DIMS)
def test_gradients_are_those_of_one_process(answers, name):
    """Within 1e-9: weights of every kind, on every rank."""
    net, batch = net_and_batch()
    loss = loss_of(net, batch)
    loss.backward()
    expected = {key: weight.grad for key, weight in net.named_parameters()}
    for their_loss, theirs in (answer[name] for answer in answers):
        torch.testing.assert_close(their_loss, loss.detach(), rtol=1e-9, atol=0)
        assert theirs.keys() == expected.keys()
        for key, grad in expected.items():
            torch.testing.assert_close(theirs[key], grad, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


def test_axes_communicate_where_the_default_group_cannot(answers):
    """pp 2, fsdp 2, tp 2: each axis adds up its own ranks, by groups that need no group of the world."""
    for rank in range(8):
        fsdp = 8 * (rank // 4) + 2 * (rank % 2) + 2
        tp = 2 * (rank - rank % 2) + 1
        data = dict.fromkeys(("fsdp", "efsdp", "batch", "loss"), fsdp)
        alone = dict.fromkeys(("dp_replicate", "etp", "cp"), rank)
        assert answers[rank]["sums"] == {"pp": 2 * (rank % 4) + 4, "tp": tp, "ep": tp, **data, **alone}
