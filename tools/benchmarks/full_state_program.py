"""A program that knows nothing of the overlay: FSDP2 x TP on 8 ranks, whose full state dict is gathered. Rank 0 prints
what it found. `full_state` runs it on stock and under `python -m torch_overlay run`."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.allocations import allocated

BLOCKS, TURNS = 8, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def model_on(mesh: Any, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(BLOCKS)])
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = model_on(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")), int(sys.argv[1]))
    wholes = {name: each.full_tensor() for name, each in model.state_dict().items() if isinstance(each, DTensor)}
    figures: dict[str, Any] = {"bytes": sum([whole.nbytes for whole in wholes.values()]), "tensors": len(wholes)}
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)

        def gather(options: StateDictOptions = options) -> dict[str, Any]:
            return get_model_state_dict(model, options=options)

        with CommDebugMode() as comm:
            state = gather()
        wrong = sum([not torch.equal(value, wholes[name]) for name, value in state.items()])
        del state
        (memory,) = allocated([gather])
        peaks = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(peaks, torch.tensor([memory.peak]))
        seconds = min([_seconds(gather) for _ in range(TURNS)])
        one = {"collectives": comm.get_total_counts(), "wrong": wrong, "seconds": seconds}
        figures["offload" if offload else "on every rank"] = one | {"peaks": [int(peak) for peak in peaks]}
    if dist.get_rank() == 0:
        pathlib.Path(os.environ["FOUND"]).write_text(json.dumps(figures))
    dist.destroy_process_group()


def _seconds(call: Any) -> float:
    dist.barrier()
    begun = time.perf_counter()
    state = call()
    dist.barrier()
    del state
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
