"""Groups by NCCL, several ranks on one GPU: settings that work, meshes that differ, ranks that die, worlds that end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from . import NO_GPU, RANKS, Check, Found, Run, asked, figures
from .links import now
from .moves import PERMUTED, pairs_on_a_mesh

# Of ranks that share a GPU: the first that works is taken for all later stages; shared/tools/one_gpu says why these.
SETTINGS = (
    {"NCCL_MAX_CTAS": "2"},
    {"NCCL_MAX_CTAS": "2", "NCCL_CUMEM_ENABLE": "0"},
    {"NCCL_MAX_CTAS": "1", "NCCL_P2P_DISABLE": "1"},
    {"NCCL_MAX_CTAS": "1", "NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"},
)


def nccl_smoke(run: Run) -> Iterator[Found]:
    if run.dry:
        yield {"check": "settings", "outcome": NO_GPU}
    for settings in () if run.dry else SETTINGS if run.ranks_per_gpu > 1 else ({},):
        os.environ.update(settings)
        (answer,) = asked(run._replace(seconds=30.0), [Check(collectives)], "nccl")
        if answer["outcome"] == "right":
            yield answer | {"settings": settings}
            break
        yield answer | {"outcome": "tried", "tried": settings, "came": answer["outcome"]}
        for name in settings:
            del os.environ[name]
    else:
        if not run.dry:
            yield {"check": "settings", "outcome": "raised", "text": "none of them works here"}
            return
    backend = "gloo" if run.dry else "nccl"
    checks = [Check(collectives), Check(pairs_on_a_mesh), Check(pairs_on_a_mesh, mesh=PERMUTED)]
    yield from asked(run, checks[run.dry :], backend)
    bound = [Check(check.function, mesh=check.mesh, needs_gpu=True) for check in checks]
    yield from asked(run, bound, backend, bound=not run.dry)


def nccl_groups(run: Run) -> Iterator[Found]:
    yield from asked(run, [Check(asynchronous), Check(destroyed)], run.best)
    for bound in (False, True)[: 1 if run.dry else 2]:
        yield from asked(run, [Check(dies_and_aborts, dies=(RANKS - 1,))], run.best, bound=bound)


def communicators(run: Run) -> Iterator[Found]:
    for bound in (False, True)[: 1 if run.dry else 2]:
        sides = (True, False)
        answers = [next(asked(run, [Check(memory_of_groups)], run.best, stock=stock, bound=bound)) for stock in sides]
        yield from answers
        if all(figures(answers)):
            both = dict(zip(("stock", "overlay"), figures(answers)))
            yield {"check": "memory of groups, both sides", "outcome": "right", "figures": both}


# --- on every rank


def collectives(mesh: Any, rank: int) -> dict[str, Any] | str:
    import torch
    import torch.distributed as dist

    device, size = mesh.device_type, dist.get_world_size()
    total = torch.full((1024,), float(rank), device=device)
    dist.all_reduce(total)
    given = torch.arange(size, device=device) + 10 * rank
    got, part = torch.empty_like(given), torch.empty(4, device=device)
    dist.all_to_all_single(got, given)
    dist.reduce_scatter_tensor(part, torch.ones(4 * size, device=device))
    whole = torch.empty(8, device=device)
    dist.all_gather_into_tensor(whole, torch.full((4,), float(rank), device=device), group=mesh.get_group(1))
    results = total[0].item(), got.tolist(), part[0].item(), whole[::4].tolist()
    wanted = (
        size * (size - 1) / 2,
        [10 * other + rank for other in range(size)],
        size,
        [rank // 2 * 2, rank // 2 * 2 + 1],
    )
    if results != wanted:
        return f"{results} instead of {wanted}"
    with open("/proc/self/maps") as file:
        loaded = {line.split()[-1].rpartition("/")[2] for line in file if "libnccl" in line}
    return {"loaded": sorted(loaded), "nccl": _nccl() if device == "cuda" else None}


def _nccl() -> int:
    """The version of the library that is loaded; torch goes on naming the one that it came with."""
    import ctypes

    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def asynchronous(mesh: Any, rank: int) -> str | None:
    """What `async_op` gives is used by the next kernel, without a wait of the program's own."""
    import torch
    from benchmarks import pairs

    wrong = []
    for pair in pairs.fewer(RANKS):
        source = pairs.source_tensor(pair, mesh, (64, 32))
        result = source.redistribute(mesh, pairs.placements(pair.target), async_op=True)
        del source
        got = torch.add(result.to_local(), 1)
        wanted = pairs.local_target(pair, tuple(mesh.get_coordinate()), (64, 32)) + 1
        wrong += [str(pair)] * (not got.cpu().equal(wanted))
    return "; ".join(wrong) or None


def dies_and_aborts(mesh: Any, rank: int) -> dict[str, Any] | str:
    """The last rank dies; the others have begun a collective with it, or with one who waits for it, which `abort` lets
    go."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    root = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("p", "q"))
    pairs_on_a_mesh(root, rank)  # communicators are made by then
    dist.barrier()
    if rank == RANKS - 1:
        os._exit(1)
    with contextlib.suppress(RuntimeError):  # gloo may find its peer gone at once
        dist.all_reduce(torch.ones(8, device=mesh.device_type), group=root.get_group(int(rank == 2)), async_op=True)
    begun = time.monotonic()
    root.abort()
    seconds = time.monotonic() - begun
    return {"seconds to abort": round(seconds, 2)} if seconds < 20 else f"abort took {seconds:.0f} s"


def destroyed(mesh: Any, rank: int) -> str | None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    store, backend = dist.distributed_c10d._get_default_store(), dist.get_backend()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.PrefixStore("again", store), rank=rank, world_size=RANKS)
    return pairs_on_a_mesh(init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("p", "q")), rank)


def memory_of_groups(mesh: Any, rank: int) -> dict[str, float]:
    """Seconds and bytes for views of a mixture of experts, and the first collectives on their groups: NCCL makes a
    communicator, and what it exchanges by, only then."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device = mesh.device_type
    _use(dist.group.WORLD, device)
    begun, known, before = now(device), set(dist.distributed_c10d._world.pg_map), _memory(device)
    root = init_device_mesh(device, (RANKS,), mesh_dim_names=("world",))
    names = (("pp", "dp", "cp"), ("pp", "dp_replicate", "fsdp"), ("pp", "efsdp", "ep"))
    views = [root._unflatten(0, (2, RANKS // 4, 2), view) for view in names]
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in known and group.size() > 1]
    for group in sorted(made, key=lambda group: group.group_name):
        _use(group, device)
    seconds = now(device) - begun
    counted = {"views": len(views), "groups of this rank": len(made), "bytes": _memory(device) - before}
    return counted | {"seconds": seconds}


def _use(group: Any, device: str) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1, device=device), group=group)
    given = torch.ones(group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(given), given, group=group)


def _memory(device: str) -> int:
    """Bytes in use on this rank's GPU, which NCCL's buffers are among; on a CPU those of the process."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
