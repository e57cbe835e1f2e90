"""A model under FSDP2 x TP, stock and overlay: the losses of all steps are equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import Check, Found, Run, asked, figures


def train(run: Run) -> Iterator[Found]:
    steps = 3 if run.dry else 20
    both = [next(asked(run, [Check(losses, (steps,))], run.best, stock=stock)) for stock in (True, False)]
    yield from both
    if all(figures(both)):
        stock, ours = [one["losses"] for one in figures(both)]
        apart = max(abs(a - b) / abs(a) for a, b in zip(stock, ours))
        outcome = "right" if apart <= 1e-6 and ours[-1] < ours[0] else "wrong"
        yield {"check": "losses equal", "outcome": outcome, "figures": {"steps": steps, "most apart": apart}}


def losses(mesh: Any, rank: int, steps: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(mesh.device_type)
    data, tensor = mesh["a"], mesh["b"]
    parallelize_module(net, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=data)
        if dist.get_backend() == "gloo":  # which has no average
            layer.set_force_sum_reduction_for_comms(True)
    optimizer, totals = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for step in range(steps):
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(mesh.device_type)
        mine = batch.chunk(data.size())[data.get_local_rank()]
        loss = (net(mine) - mine).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data.get_group())
        totals.append(total.item() / data.size())
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    offloaded = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, value in offloaded.items():  # on the first rank
        if value.device.type != "cpu" or not value.equal(state[name].cpu()):
            raise AssertionError(f"{name} is another one when it is offloaded")
    totals.append(sum(value.double().square().sum().item() for value in state.values()))
    return {"losses": totals[:-1], "squares of the weights": totals[-1:]}
