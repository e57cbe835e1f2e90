"""What each rank of `bench.py hosts` runs."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_overlay
from torch_overlay.testing.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable

TRAIN = 2  # ranks
SHAPES = [(1024, 512)] * 48 + [(4096, 512)] * 6 + [(512,)] * 30  # 75.5 MB of bfloat16
ROUNDS = 3


def seconds_of(call: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        call()
        dist.barrier()
        least = min(least, time.perf_counter() - begun)
    return least


def weights(rank: int, size: int, tp: int) -> dict[str, Any]:
    trains, train = rank < TRAIN, DeviceMesh("cpu", [*range(TRAIN)])
    serve = DeviceMesh("cpu", torch.arange(TRAIN, size).view(-1, tp))
    generator = torch.Generator().manual_seed(3)
    whole = {f"w{n}": torch.randn(shape, generator=generator).bfloat16() for n, shape in enumerate(SHAPES)}
    mesh, placements = (train, [Shard(0)]) if trains else (serve, [Replicate(), Shard(0)])
    own = {name: distribute_tensor(each.clone(), mesh, placements, src_data_rank=None) for name, each in whole.items()}
    local = {name: each.to_local().clone() for name, each in own.items()}
    wrong = 0

    def by_hand() -> None:
        for name, each in whole.items():
            full = own[name].full_tensor() if trains else torch.empty_like(each)
            dist.broadcast(full, 0)
            if not trains:
                own[name].to_local().copy_(full.chunk(tp)[serve.get_coordinate()[1]])

    seconds: dict[str, float] = {}
    options: dict[str, dict[str, Any]] = {
        "Transfer": {},
        "relay=False": {"relay": False},
        "1 % changed": {"changes": True},
    }
    for way in ("by hand", *options):
        if not trains:
            for each in own.values():
                each.to_local().zero_()
        if way == "by hand":
            seconds[way] = seconds_of(by_hand)
        else:
            with torch_overlay.Transfer(*((own, None) if trains else (None, own)), timeout=300, **options[way]) as sync:
                sync.run()
                for said, step in ((way, 100), ("all changed", 1)) if way == "1 % changed" else ((way, 0),):
                    # Each run finds elements changed since the one before.
                    change = [each.to_local().view(-1)[::step] for each in own.values()] if step and trains else []

                    def run(sync: torch_overlay.Transfer = sync, change: list[torch.Tensor] = change) -> None:
                        if change:
                            torch._foreach_neg_(change)
                        sync.run()

                    seconds[said] = seconds_of(run)
        if way != "1 % changed":
            wrong += sum(not torch.equal(each.to_local(), local[name]) for name, each in own.items())
    count = torch.tensor([wrong])
    dist.all_reduce(count)
    return {"seconds": seconds, "wrong": int(count), "size": sum(each.nbytes for each in whole.values())}


def moves(rank: int, size: int, on: int, count: int) -> dict[str, Any]:
    """Random redistributions of a tensor of 4 MB on meshes over all hosts; stock has a group for all their axes."""
    if on:
        torch_overlay.enable()
    drawn = random.Random(5)
    meshes = [init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("host", "local"))]
    if size % 8 == 0:
        meshes.append(init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=("a", "b", "c")))
    for mesh in meshes:
        mesh[mesh.mesh_dim_names]._flatten("all")
    whole = torch.arange(1 << 20, dtype=torch.float32).view(1024, 32, 32)
    kinds = [Replicate(), Shard(0), Shard(1), Shard(2)]
    seconds, wrong = [], 0
    for number in range(count):
        mesh = meshes[number % len(meshes)]
        before, after = ([drawn.choice(kinds) for _ in range(mesh.ndim)] for _ in range(2))
        given = distribute_tensor(whole, mesh, before, src_data_rank=None)
        wanted = distribute_tensor(whole, mesh, after, src_data_rank=None)
        wrong += not torch.equal(given.redistribute(mesh, after).to_local(), wanted.to_local())
        seconds.append(seconds_of(lambda given=given, mesh=mesh, after=after: given.redistribute(mesh, after)))
    return {"seconds": seconds, "wrong": wrong}


def main() -> None:
    job, said, rank, size, *given = sys.argv[1:]
    dist.init_process_group("gloo", f"tcp://{Hosts.address(0)}:29650", rank=int(rank), world_size=int(size))
    torch.set_num_threads(1)
    found = {"weights": weights, "moves": moves}[job](int(rank), int(size), *map(int, given))
    if rank == "0":
        Path(said).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
