"""150 random redistributions on three meshes of eight ranks, which threads play; how many were wrong, as JSON.

It runs on whatever torch Python imports and knows nothing of ours, so that a torch as released and every prefix of the
stack are asked the same. `--check` starts it as a program.
"""

import itertools
import json
import random
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

RANKS, MOVES, SECONDS = 8, 50, 30
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
MESHES = {
    "identity": torch.arange(RANKS).reshape(2, 2, 2),
    "transposed": torch.arange(RANKS).reshape(2, 2, 2).permute(2, 1, 0),
    "permuted": torch.tensor(SHUFFLED).reshape(2, 2, 2),
}


def cut(whole, placements, sizes, coordinate):
    """What one coordinate holds, by chunking axis after axis; the twin that can't be wrong."""
    for placement, size, at in zip(placements, sizes, coordinate):
        if isinstance(placement, Shard):
            step = -(-whole.shape[placement.dim] // size)
            start = min(at * step, whole.shape[placement.dim])
            whole = whole.narrow(placement.dim, start, min(step, whole.shape[placement.dim] - start))
    return whole


def move(ranks, shape, source, target):
    """On one rank: whether the redistribution gave what chunking by hand gives."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b", "c"))
    for names in (("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c")):
        mesh[names]._flatten("".join(names))
    whole = torch.arange(1.0, 1.0 + shape[0] * shape[1]).reshape(shape) * RANKS
    coordinate = (ranks == dist.get_rank()).nonzero()[0].tolist()
    terms = 2 ** sum(placement.is_partial() for placement in source)
    local = (cut(whole, source, mesh.shape, coordinate) / terms).contiguous()
    held = DTensor.from_local(local, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride())
    return torch.equal(held.redistribute(placements=target).to_local(), cut(whole, target, mesh.shape, coordinate))


def right_everywhere(*case):
    """One world of threads for one case; False if a rank has something else, raises, or waits."""
    for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):  # keyed by meshes, which belong to threads
        getattr(getattr(_redistribute, name, None), "cache_clear", lambda: None)()
    _redistribute.clear_redistribute_planner_cache()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, found = dist.HashStore(), [False] * RANKS

    def play(rank):
        dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
        try:
            found[rank] = move(*case)
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    ProcessLocalGroup.reset()
    _uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return all(found)


def cases():
    """The same on every torch: 50 on each mesh, of shards that are empty, or even on no, some or all axes."""
    chosen = random.Random(0)
    kinds = (Replicate(), Shard(0), Shard(1), Partial())
    sources, targets = (list(itertools.product(kinds[:n], repeat=3)) for n in (4, 3))
    for name in MESHES:
        for _ in range(MOVES):
            shape = chosen.choice([(16, 16), (8, 4), (6, 12), (5, 3), (1, 7), (13, 2)])
            yield name, shape, chosen.choice(sources), chosen.choice(targets)


def main():
    wrong = dict.fromkeys(MESHES, 0)
    for name, shape, source, target in cases():
        wrong[name] += not right_everywhere(MESHES[name], shape, source, target)
    print(json.dumps(wrong))


if __name__ == "__main__":
    sys.exit(main())
