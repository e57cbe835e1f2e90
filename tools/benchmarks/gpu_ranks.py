"""What `bench gpu` runs on every rank, on NCCL or, to try the code, on gloo. Rank 0's answer is the one that counts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from .sides import OVERLAY, SIDES, STOCK, in_turns, on

NAMES, SHARED = "names", "ranks"  # values of the option share_groups
ONE_AFTER_THE_OTHER, AT_ONCE = "two collectives, one after the other", "two collectives at once"
BOTH_WAYS = (ONE_AFTER_THE_OTHER, AT_ONCE)


def devices() -> dict[str, Any]:
    """What torch finds here; in a process that ends, for looking at CUDA forbids a fork."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else None
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    return {"devices": names, "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def _open(
    store: Any, turn: object, rank: int, size: int, backend: str, device: str, share: int = 1, bound: bool = False
) -> None:
    """A world in which so many ranks in a row share a device; bound to that, or not."""
    import torch
    import torch.distributed as dist

    how: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(rank // share)
        how = {"device_id": torch.device("cuda", rank // share)} if bound else {}
    dist.init_process_group(backend, store=dist.PrefixStore(str(turn), store), rank=rank, world_size=size, **how)


def _store(port: int) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("localhost", port, is_master=False)


# --- groups


def groups(
    rank: int, size: int, port: int, backend: str, device: str, share: int, repeats: int, bound: bool
) -> dict[str, dict[str, list]]:
    """Groups of this rank, seconds and bytes for making a mesh with views and using each group once, by side.

    Every turn is a world made anew. Used once, for NCCL makes a communicator with the first collective on a group, and
    what it exchanges by with the first all-to-all.
    """
    import torch.distributed as dist

    from .fake_world import GroupCounter

    store, worlds = _store(port), itertools.count()

    def one_world(side: str) -> dict[str, float]:
        _open(store, next(worlds), rank, size, backend, device, share, bound)
        with on(side):
            _use(dist.group.WORLD, device)
            before, begun = memory(device), _now(device)
            _views(size, device)
            of_several = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
            for group in sorted(of_several, key=lambda group: group.group_name):
                _use(group, device)
            seconds = _now(device) - begun
            made = [ranks for ranks in GroupCounter.open() if len(ranks) > 1]
            figures = {"groups": len(made), "seconds": seconds, "memory": max(memory(device) - before, 0)}
        dist.destroy_process_group()
        return figures

    turns = in_turns(one_world, -(-repeats // 2))  # a round has two worlds a side
    return {side: {name: [one[name] for one in turns[side]] for name in turns[side][0]} for side in SIDES}


def _views(size: int, device: str) -> Any:
    """As a trainer of a mixture of experts: one world under three sets of names."""
    from torch.distributed.device_mesh import init_device_mesh

    root = init_device_mesh(device, (size,), mesh_dim_names=("world",))
    names = (("pp", "dp", "cp"), ("pp", "dp_replicate", "fsdp"), ("pp", "efsdp", "ep"))
    sizes = (2, size // 4, 2) if size >= 4 else (1, 1, 2)
    return [root._unflatten(0, sizes, view) for view in names]


def _use(group: Any, device: str) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1, device=device), group=group)
    given = torch.ones(group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(given), given, group=group)


def memory(device: str) -> int:
    """Bytes in use on this rank's GPU, which NCCL's buffers are among; on a CPU those of the process."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _now(device: str) -> float:
    """The time, when all ranks and their devices have come here."""
    import torch.distributed as dist

    from .redistribute import settle

    settle(device)
    dist.barrier()
    settle(device)
    return time.perf_counter()


# --- moves


def moves(
    rank: int, size: int, port: int, backend: str, device: str, share: int, sizes: list[int], count: int | None
) -> list:
    """As `bench redistribute` measures each pair: both sides in turns, every result checked on every rank."""
    import torch
    import torch.distributed as dist

    from . import pairs, redistribute

    _open(_store(port), 0, rank, size, backend, device, share)
    chosen = (pairs.fixed(size) or pairs.fewer(size))[:count]
    meshes: dict[str, dict] = {}
    for side in SIDES:
        with on(side):
            different = dict.fromkeys(pair.sizes for pair in chosen)
            meshes[side] = {one: pairs.flattened_mesh(one, device) for one in different}
    with torch.no_grad():
        found = [row for one in sizes for row in redistribute.one_size(chosen, meshes, one, rounds=1, batches=2)]
    dist.destroy_process_group()
    return found


# --- overlap


def overlap(
    rank: int, size: int, port: int, backend: str, device: str, share: int, **how: int
) -> dict[str, dict[str, list]]:
    """Seconds of a reduce-scatter over ``fsdp`` and an all-gather over ``ep``, two axes over the same ranks.

    On stock each axis has a group. Under the overlay they have two under ``share_groups="names"`` and one under
    ``"ranks"``, whose collectives then run one after the other, as if nothing had been asked for at once.
    """
    import torch.distributed as dist

    store, worlds = _store(port), itertools.count()

    def one_world(way: str) -> dict[str, list[float]]:
        _open(store, next(worlds), rank, size, backend, device, share)
        with on(STOCK) if way == STOCK else on(OVERLAY, share_groups=way):
            seconds = _both_ways(device, size, **how)
        dist.destroy_process_group()
        return seconds

    turns = in_turns(one_world, 1, (STOCK, NAMES, SHARED), warm_up=False)
    return {way: {name: [s for one in turns[way] for s in one[name]] for name in BOTH_WAYS} for way in turns}


def _both_ways(world_device: str, ranks: int, nbytes: int, repeats: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    root = init_device_mesh(world_device, (ranks,), mesh_dim_names=("world",))
    fsdp = root._unflatten(0, (2, ranks // 2), ("dp", "fsdp"))["fsdp"].get_group()
    ep = root._unflatten(0, (2, ranks // 2), ("pp", "ep"))["ep"].get_group()
    whole, part = (torch.ones(nbytes // 4 // many, device=world_device) for many in (1, ranks // 2))
    gathered = torch.empty_like(whole)

    def start() -> list[Any]:
        return [
            dist.reduce_scatter_tensor(part.clone(), whole, group=fsdp, async_op=True),
            dist.all_gather_into_tensor(gathered, part, group=ep, async_op=True),
        ]

    def at_once() -> None:
        for work in start():
            work.wait()

    def in_turn() -> None:
        dist.reduce_scatter_tensor(part.clone(), whole, group=fsdp)
        if world_device == "cuda":
            torch.cuda.synchronize()
        dist.all_gather_into_tensor(gathered, part, group=ep)

    calls: dict[str, Callable[[], None]] = {ONE_AFTER_THE_OTHER: in_turn, AT_ONCE: at_once}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            begun = _now(world_device)
            for _ in range(5):
                call()
            seconds = (_now(world_device) - begun) / 5
            if round_:
                found[name].append(seconds)
    return found
