"""Redistributions: by a fixed set of pairs, at random, compiled, under a CUDA graph."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks import pairs
from fuzz_ranks import run as search

from twins_ranks import MeshRecipe

from . import RANKS, Check, Found, Run, asked

SHAPE = (16, 8)
PERMUTED = MeshRecipe((3, 1, 0, 2), (2, 2))


def nccl_fuzz(run: Run) -> Iterator[Found]:
    """Random cases on both sides: none wrong and none hung, and none that raises if none does on stock."""
    limits = (6, 15.0) if run.dry else (400, 60.0)
    counts = search(RANKS, limits[0], 7, limits[1], not run.dry, run.seconds, alone=True, **run.world(run.best))
    ours, stock = counts["overlay"], counts.get("stock", {})
    bad = ours.get("wrong", 0) + ours.get("hung", 0) + max(ours.get("raised", 0) - stock.get("raised", 0), 0)
    yield {"check": f"random cases on {run.best}", "outcome": "wrong" if bad else "right", "figures": counts}


def compiled(run: Run) -> Iterator[Found]:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # ranks are daemons, which have no children
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
    checks = [Check(compiled_against_eager), Check(async_tensor_parallelism), Check(cuda_graph, needs_gpu=True)]
    yield from asked(run._replace(seconds=90.0), checks, run.best)


# --- on every rank


def pairs_on_a_mesh(mesh: Any, rank: int) -> str | None:
    at, wrong = tuple(mesh.get_coordinate()), []
    for pair in pairs.fewer(RANKS):
        target = pairs.placements(pair.target)
        result = pairs.source_tensor(pair, mesh, SHAPE).redistribute(mesh, target).to_local()
        if result.device.type != mesh.device_type or not result.cpu().equal(pairs.local_target(pair, at, SHAPE)):
            wrong.append(str(pair))
    return "; ".join(wrong) or None


def _function(mesh: Any, source: Any, target: Any) -> Any:
    from torch.distributed.tensor import DTensor

    def moved(local):
        placed = DTensor.from_local(local.sin(), mesh, source, run_check=False)
        return placed.redistribute(mesh, target).to_local() * 2

    return moved


def compiled_against_eager(mesh: Any, rank: int) -> str | None:
    """Some lengths, so that it is compiled anew with dynamic shapes."""
    import torch

    compiler, wrong = "inductor" if mesh.device_type == "cuda" else "aot_eager", []
    for source, target in ((("S0", "S1"), ("S1", "S0")), (("P", "P"), ("R", "S0")))[: 1 + (compiler == "inductor")]:
        eager = _function(mesh, pairs.placements(source), pairs.placements(target))
        torch._dynamo.reset()
        fast = torch.compile(eager, backend=compiler, fullgraph=True)
        for rows in (8, 16, 24)[: 3 if compiler == "inductor" else 2]:
            local = torch.arange(rows * 8.0, device=mesh.device_type).reshape(rows, 8) + rank
            if not torch.allclose(fast(local), eager(local)):
                wrong.append(f"{source} -> {target}, {rows} rows")
    return "; ".join(wrong) or None


def async_tensor_parallelism(mesh: Any, rank: int) -> str | None:
    """Inductor finds its patterns in a sequence-parallel MLP; running what it makes of them needs several GPUs with
    links."""
    import test_async_tp

    wanted = {"fused_all_gather_matmul": 1, "fused_matmul_reduce_scatter": 1}
    fused = test_async_tp.trained(mesh["b"], 0, 2)
    return None if fused == [wanted, wanted] else f"{fused}"


def cuda_graph(mesh: Any, rank: int) -> str | None:
    """Captured once, replayed with other values. Gloo can't be captured, so this is for NCCL."""
    import torch
    import torch.distributed as dist

    if dist.get_backend() != "nccl":
        return "needs NCCL"
    moved = _function(mesh, pairs.placements(("S0", "R")), pairs.placements(("S1", "R")))
    local, stream = torch.ones(8, 8, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            moved(local)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = moved(local)
    local.copy_(torch.arange(64.0, device="cuda").reshape(8, 8) + rank)
    graph.replay()
    torch.cuda.synchronize()
    return None if torch.equal(result, moved(local)) else "the replay has other values than the call"
