"""One rank of a real client: `python client.py NAME FOLDER` under torchrun, on stock or behind `torch_overlay run`.

Each client trains a small model with random weights. A rank writes what has to be equal on both sides (the local parts
of tensors, losses), and how many collectives and groups it took.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_overlay
from torch_overlay.demo.ranks import count_collectives


class Notes:
    """What a rank found."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"moved": {}, "summed": {}, "collectives": {}, "calls": 0}
        create = c10d._new_group_with_tag

        @functools.wraps(create)  # a Transfer makes its group by a copy of torch's own function
        def counted(*given: Any, **named: Any) -> Any:
            self.found["calls"] += 1
            return create(*given, **named)

        c10d._new_group_with_tag = counted

    def count(self, name: str, call: Callable[[], Any]) -> Any:
        result, kinds = count_collectives(call)
        self.found["collectives"][name] = sum(kinds.values())
        return result

    def keep(self, kind: str, name: str, tensors: dict[str, Any]) -> None:
        """Of a DTensor the part of this rank."""
        for key, value in tensors.items():
            if isinstance(value, torch.Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                self.found[kind][f"{name}.{key}"] = local.detach().clone()


def small_experts(**sizes: int) -> Any:
    """The configuration of a Qwen3 mixture of experts."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        **sizes,
    )


def transformers_packed(notes: Notes, folder: pathlib.Path) -> None:
    """A Qwen3 mixture of experts by its own plans: its weights as they lie go to each other plan, to a server whose
    loader takes slices, and through checkpoints. AssertionError if a bit differs."""
    import torch.distributed.checkpoint as dcp
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    rank, ranks, path = dist.get_rank(), dist.get_world_size(), str(folder / "random")
    if rank == 0:
        Qwen3MoeForCausalLM(small_experts(num_key_value_heads=4, decoder_sparse_step=2)).save_pretrained(path)
    dist.barrier()
    half = ranks // 2
    plans = {
        "tp": dict(tp_size=ranks),
        "ep": dict(tp_size=ranks, ep_size=ranks),
        "fsdp x tp": dict(fsdp_size=2, tp_size=half),
        "fsdp x ep": dict(fsdp_size=2, tp_size=half, ep_size=half),
    }
    laid = {}
    for plan, degrees in plans.items():
        config = DistributedConfig(**degrees)
        model = Qwen3MoeForCausalLM.from_pretrained(path, distributed_config=config, dtype=torch.float32)
        laid[plan] = {name: parameter.detach() for name, parameter in model.named_parameters()}
        notes.keep("moved", plan, laid[plan])
        packed = [tensor for name, tensor in laid[plan].items() if name.endswith("gate_up_proj")]
        notes.found["boxes"] = notes.found.get("boxes", 0) + sum(len(each.__create_chunk_list__()) for each in packed)

    def check(plan: str, said: str) -> None:
        for name, tensor in laid[plan].items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(local, notes.found["moved"][f"{plan}.{name}"]), f"{said} {plan}: {name}"
            local.fill_(-1)

    def fill(plan: str) -> None:
        for name, tensor in laid[plan].items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(notes.found["moved"][f"{plan}.{name}"])

    whole = dict(Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    width = 32 // ranks  # of what a rank of the server has of gate, and of up

    class Server(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.served = nn.ParameterDict()
            for name, weight in whole.items():
                shape = (8, 2 * width, 64) if name.endswith("gate_up_proj") else weight.shape
                self.served[name.replace(".", "/")] = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)

        def load_weights(self, weights: Any) -> None:
            for name, weight in weights:
                param = self.served[name.replace(".", "/")]
                if name.endswith("gate_up_proj"):
                    for number, part in enumerate(weight.chunk(2, 1)):
                        param[:, number * width :][:, :width].copy_(part[:, rank * width :][:, :width])
                else:
                    param.copy_(weight)

    for source in plans:
        fill(source)
        for target in plans:
            if target != source:
                fill(target)
                check(target, "as it was")
                with torch_overlay.Transfer(laid[source], laid[target]) as transfer:
                    transfer.run()
                check(target, f"from {source} to")
        server, wanted = Server(), Server()
        metas = {name: weight.to("meta") for name, weight in whole.items()}
        landings = torch_overlay.landings(server.load_weights, server, metas)
        assert not landings.whole, landings
        with torch_overlay.Transfer(laid[source], landings.target()) as transfer:
            transfer.run()
        with torch.no_grad():
            wanted.load_weights(whole.items())
        for name, weight in wanted.served.items():
            assert torch.equal(server.served[name], weight), f"{source} to the server: {name}"
        saved = str(folder / source.replace(" ", "-"))
        dcp.save(laid[source], checkpoint_id=saved)
        for target in plans:
            fill(target)
            check(target, "as it was")
            dcp.load(laid[target], checkpoint_id=saved)
            check(target, f"saved by {source}, loaded by")


def transformers_experts(notes: Notes, folder: pathlib.Path) -> None:
    """A Qwen3 mixture of experts is loaded, trained, saved, loaded again, and clipped as transformers' Trainer does."""
    from transformers import Qwen3MoeForCausalLM, Trainer
    from transformers.distributed import (
        DistributedConfig,
        gather_full_state_dict,
        load_optimizer_distributed,
        save_optimizer_distributed,
    )

    config = small_experts(num_key_value_heads=2)
    random, shards, state = (str(folder / name) for name in ("random", "shards", "optimizer"))
    if dist.get_rank() == 0:
        Qwen3MoeForCausalLM(config).save_pretrained(random)
    dist.barrier()

    def load(path: str) -> Any:
        degrees = DistributedConfig(fsdp_size=4, tp_size=2, ep_size=4)
        return Qwen3MoeForCausalLM.from_pretrained(path, distributed_config=degrees, dtype=torch.float32)

    def step(clip: bool) -> None:
        batch = torch.randint(128, (4, 2, 16))[dist.get_rank() // 2]  # one batch for a group of tp
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        notes.keep("summed", f"loss {clip}", {"loss": loss})
        if clip:
            notes.count("clip", lambda: Trainer._mixed_mesh_grad_norm(None, model, max_norm=0.1))
        optimizer.step()
        optimizer.zero_grad()

    model = load(random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step(clip=False)
    notes.keep("moved", "weights", model.state_dict())
    notes.count("save", lambda: model.save_pretrained(shards, distributed_checkpoint=True))
    notes.count("save optimizer", lambda: save_optimizer_distributed(model, optimizer, state))
    notes.count("load optimizer", lambda: load_optimizer_distributed(model, optimizer, state))
    notes.keep("moved", "whole", notes.count("gather", lambda: gather_full_state_dict(model)))
    notes.keep("moved", "loaded", notes.count("load", lambda: load(shards)).state_dict())
    step(clip=True)
    notes.keep("summed", "clipped", model.state_dict())


def torchtitan_meshes(notes: Notes, folder: pathlib.Path) -> None:
    """A model of FSDP2 x TP on the meshes of torchtitan's ParallelDims, and its clipping."""
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.utils import clip_grad_norm_

    parallel_dims.device_type = "cpu"  # torchtitan takes CUDA where there is no accelerator
    degrees = dict(dp_replicate=1, dp_shard=2, cp=2, tp=2, pp=1, ep=4)
    dims = ParallelDims(**degrees, world_size=dist.get_world_size(), spmd_backend="partial_dtensor")
    dims.build_mesh()
    fsdp, tp = dims.get_mesh("fsdp"), dims.get_mesh("tp")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(2)])
    for block in model:
        parallelize_module(block, tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(block, mesh=fsdp)
    fully_shard(model, mesh=fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for clip in (False, True):
        model(torch.randn(4, 8, 64)[fsdp.get_local_rank()]).square().mean().backward()
        if clip:
            notes.count("clip", lambda: clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()
        notes.keep("summed" if clip else "moved", "weights", model.state_dict())
    notes.keep("moved", "ranks", {name: mesh.mesh for name, mesh in dims.get_all_one_dimensional_meshes().items()})


def main() -> None:
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    notes = Notes()
    globals()[name](notes, folder)
    notes.found["overlay"] = torch_overlay.is_enabled()
    torch.save(notes.found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
