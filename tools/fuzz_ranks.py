"""Gloo ranks as processes that a parent hands cases, one at a time, so that wrong, raised and hung can be told apart.

Each rank answers for itself. A rank that doesn't answer in time hangs: all are killed and new ones start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import itertools
import logging
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

SAID = {
    "Invalid scalar type": "a type that gloo doesn't move",
    "not supported for NCCL process group": "a type that NCCL doesn't move",
    "with NCCL": "a reduction that NCCL doesn't do",
    "not supported yet": "said to be unsupported",
    "unsupported": "said to be unsupported",
    ".mesh.make(": "making the mesh",
}
NEIGHBOUR = "a mesh over all ranks that no case is about"
START_SECONDS, MOST_SHOWN = 120, 3
OUTCOMES = ("right", "wrong", "raised", "hung")
# Then new processes, for on stock every mesh leaves groups and their threads behind, and NCCL's much device memory.
CASES_PER_WORLD = {"cpu": 100, "cuda": 40}


class Ranks:
    """Processes of one world; `ask` runs a case on all of them.

    Args:
        size: of the world.
        stock: torch as released, without the overlay.
        seconds: how long a rank may take for a case before it counts as hung.
        unplanned: under the overlay, by torch's own steps, as what can't be planned.
        backend, device: of the world and of its meshes.
        ranks_per_gpu: how many ranks in a row take one device.
        bound: the world is bound to the rank's device, so that NCCL's groups are splits of it.
    """

    def __init__(
        self,
        size: int,
        stock: bool,
        seconds: float,
        unplanned: bool = False,
        backend: str = "gloo",
        device: str = "cpu",
        ranks_per_gpu: int = 1,
        bound: bool = False,
    ):
        self.size, self.stock, self.seconds, self.unplanned = size, stock, seconds, unplanned
        self.backend, self.device, self.ranks_per_gpu, self.bound = backend, device, ranks_per_gpu, bound
        self.starts = self._asked = 0
        self.counters: Counter[str] = Counter()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def ask(self, case: Any) -> tuple[str, Any]:
        """What came of a case, the worst of all ranks, and its text; or its figures on the first rank, where all are
        right. Ranks that a case says die in it (``dies``) owe no answer."""
        if self._asked == CASES_PER_WORLD[self.device]:
            self.stop()
        if not self._processes:
            self._start()
        self._asked += 1
        try:
            for pipe in self._pipes:
                pipe.send(case)
        except OSError:
            self.stop()
            return "hung", "a rank was gone before it got the case"
        answers = self._answers()
        silent = [rank for rank in range(self.size) if rank not in answers and rank not in getattr(case, "dies", ())]
        found = {rank: answer for rank, answer in answers.items() if answer[0] != "right"}
        raised = [rank for rank, answer in found.items() if answer[0] == "raised"]
        if silent or 0 < len(raised) < self.size:
            self.stop(kill=True)  # the ranks' groups may be out of step
        if silent and not raised:
            return "hung", f"ranks {silent} didn't answer in {self.seconds:g} s"
        if not found:
            return "right", next(iter(answers.values()))[1]
        rank = min(raised or found)
        return found[rank][0], f"rank {rank}: {found[rank][1]}"

    def stop(self, kill: bool = False) -> None:
        """End the processes, adding what they counted; with `kill`, at once."""
        if not kill:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            for what, counted in self._answers().values():
                if what == "counted":
                    self.counters.update(counted)
        for process in self._processes:
            process.kill() if kill else process.join(5)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _answers(self, seconds: float | None = None) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + (seconds or self.seconds)
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), left):
                rank = open_pipes.pop(pipe)
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = pipe.recv()
        return answers

    def _start(self) -> None:
        # Forked, for a spawned rank imports torch, and with the first DTensor torch._dynamo, for many seconds; the
        # parent only imports them and runs nothing.
        import twins_ranks  # noqa: F401

        if os.environ.get("TORCH_OVERLAY_TEST") == "patched":
            import way  # noqa: F401  # a torch that carries our code: enable() sets its options

        context = multiprocessing.get_context("fork")
        self.starts, self._asked = self.starts + 1, 0
        folder = tempfile.mkdtemp()
        for rank in range(self.size):
            here, there = context.Pipe()
            own = f"cuda:{rank // self.ranks_per_gpu}" if self.device == "cuda" else self.device
            world = (os.path.join(folder, "store"), self.backend, own, self.bound)
            how = (rank, self.size, world, self.stock, self.unplanned, self.starts % 2 == 0, there)
            process = context.Process(target=_rank, args=how, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        ready = self._answers(START_SECONDS)
        assert len(ready) == self.size, f"only ranks {sorted(ready)} came up"


def _rank(
    rank: int,
    size: int,
    world: tuple[str, str, str, bool],
    stock: bool,
    unplanned: bool,
    rounds: bool,
    pipe: Connection,
) -> None:
    """One rank: a world, then case after case, with the meshes kept; with `rounds`, small tensors go in as many as
    large ones do."""
    import torch

    gc.freeze()  # what the parent has: each full collection would go through it, and copy the pages of the fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if not stock:
        import torch_overlay

        torch_overlay.enable()
        if unplanned:
            _plan_nothing()
        if rounds:
            _in_rounds()
    device = _open(rank, size, *world)
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (2, size // 2) if size % 2 == 0 else (size,)
    meshes: dict[Any, Any] = {NEIGHBOUR: init_device_mesh(device, sizes, mesh_dim_names=("x", "y")[: len(sizes)])}
    pipe.send(("ready", ""))
    while (case := pipe.recv()) is not None:
        pipe.send(_answer(case, meshes, rank, stock))
    pipe.send(("counted", {} if stock else _counted()))
    os._exit(0)


def _open(rank: int, size: int, file: str, backend: str, own: str, bound: bool) -> str:
    """Enter the world with this device of one's own; its type."""
    import torch
    import torch.distributed as dist

    device, timeout = torch.device(own), datetime.timedelta(seconds=60)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    how: dict[str, Any] = {"device_id": device} if bound else {}
    dist.init_process_group(
        backend, store=dist.FileStore(file, size), rank=rank, world_size=size, timeout=timeout, **how
    )
    return device.type


def _plan_nothing() -> None:
    from torch_overlay.distributed.tensor import _redistribute
    from torch_overlay.distributed.tensor._runner.answers import Fallback

    _redistribute.find_answer = lambda *_: Fallback("the search asks for torch's own steps")


def _bytes_decide() -> contextlib.AbstractContextManager[object]:
    from twins_ranks import bytes_decide

    return bytes_decide()


def _in_rounds() -> None:
    from torch_overlay.distributed.tensor._planner import cost

    cost._ASSUMED = {"cpu": cost.Cost(round_bytes=1)}  # on other devices as there


def _answer(case: Any, meshes: dict[Any, Any], rank: int, stock: bool) -> tuple[str, Any]:
    try:
        if not stock:
            import torch_overlay

            torch_overlay.enable(flatten=case.flatten)
        key = case.mesh, case.flatten  # the option says which groups are made with a mesh
        if key not in meshes:
            meshes[key] = case.mesh.make(meshes[NEIGHBOUR].device_type)
        with _bytes_decide() if case.bytes_only and not stock else contextlib.nullcontext():
            if case.beside:
                found = _beside(meshes[NEIGHBOUR], lambda: case.problem(meshes[key], rank))
            else:
                found = case.problem(meshes[key], rank)
    except Exception:  # whatever it is, the case is worth printing
        return "raised", traceback.format_exc()
    if isinstance(found, dict):  # figures of a case that isn't about right and wrong alone
        return "right", found
    return ("wrong", found) if found else ("right", "")


def _beside(mesh: Any, work: Callable[[], str | None]) -> str | None:
    """What is wrong with work, or with sums over the axes of another mesh in a second thread at the same time."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    wrong: list[float] = []

    def sums() -> None:
        for step in range(4):
            local = torch.full((8,), float(step + 1), dtype=torch.float64, device=mesh.device_type)
            total = DTensor.from_local(local, mesh, [Partial()] * mesh.ndim, run_check=False)
            found = total.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
            if not torch.all(found == (step + 1) * mesh.size()):
                wrong.append(found[0].item())

    thread = threading.Thread(target=sums, daemon=True)
    thread.start()
    problem = work()
    thread.join(30)
    if thread.is_alive():
        return "a thread that uses another mesh hangs"
    return problem or (f"another mesh has {wrong} in a second thread" if wrong else None)


def _counted() -> dict[str, int]:
    from torch_overlay.distributed.tensor._runner.answers import counters

    found = counters()
    del found["plans in the cache"], found["collectives that more groups would save"]
    fallbacks: Any = found.pop("redistributions by torch's own code")
    return {**found, **{f"torch's own code: {why}": n for why, n in fallbacks.items()}}  # type: ignore[dict-item]


def run(size: int, cases: int, seed: int, seconds: float, stock: bool, limit: float, **world: Any) -> dict[str, Any]:
    """Run cases on that many ranks under the overlay, and on stock if asked; print the first failures and counts.

    Args:
        world: ``backend``, ``device`` and ``ranks_per_gpu``; ``unplanned``, of the overlay alone; and ``alone``, which
            leaves out of every case its second thread with another mesh, as a backend needs whose communicators have
            one order everywhere.

    Returns the counts of each side; ``failures`` is how many cases weren't right under the overlay.
    """
    from fuzz_cases import random_cases

    alone, unplanned = world.pop("alone", False), world.pop("unplanned", False)
    sides = {"overlay": Ranks(size, False, limit, unplanned, **world)}
    if stock:
        sides["stock"] = Ranks(size, True, limit, **world)
    counts: dict[str, Counter[str]] = {side: Counter() for side in sides}
    spent: Counter[str] = Counter()
    began, shown, done = time.monotonic(), 0, 0
    for case in itertools.islice(random_cases(seed, size), cases):
        case = dataclasses.replace(case, beside=False) if alone else case
        done += 1
        for side, ranks in sides.items():
            start = time.perf_counter()
            outcome, text = ranks.ask(case)
            spent[side] += time.perf_counter() - start
            counts[side][outcome] += 1
            if outcome in ("raised", "wrong"):
                counts[side][f"{outcome}: {kind(case, text)}"] += 1
            if side == "overlay" and outcome != "right" and shown < MOST_SHOWN:
                shown += 1
                print(f"{outcome}: {text}\nfrom twins_ranks import *\n{case!r}", flush=True)
        if time.monotonic() - began > seconds:
            break
    for side, ranks in sides.items():
        ranks.stop()
        report(side, done, seed, counts[side], spent[side], ranks)
    failures = done - counts["overlay"]["right"]
    return {"cases": done, "seed": seed, "failures": failures, **{side: dict(counts[side]) for side in sides}}


def kind(case: Any, text: str) -> str:
    """Why a case isn't right, in the few words by which such cases are counted."""
    for words, said in SAID.items():
        if words in text:
            return said
    order, kinds = "".join(case.mesh.axes), {placement[0] for placement in case.source + case.target}
    traits = {
        "permuted mesh": list(case.mesh.ranks) != sorted(case.mesh.ranks) or list(order) != sorted(order),
        "uneven shards": uneven(case, case.source) or uneven(case, case.target),
        "strided or ordered": case.source_order or case.target_order or "SS" in kinds,
    }
    return ", ".join(trait for trait, found in traits.items() if found) or "even shards in order"


def uneven(case: Any, placements: tuple) -> bool:
    """Is some dim cut into pieces that aren't alike?"""
    parts = [1] * len(case.shape)
    for size, (what, *rest) in zip(case.mesh.view_sizes, placements):
        if what in ("S", "SS"):
            parts[rest[0]] *= size
    return any(length % count for length, count in zip(case.shape, parts))


def report(side: str, done: int, seed: int, counts: Counter[str], seconds: float, ranks: Ranks) -> None:
    """One line for a side, then what it counted."""
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    print(f"{side}: {done} cases, seed {seed}: {said}; {seconds:.1f} s, {ranks.starts} worlds")
    for what, number in sorted(counts.items()):
        if what not in OUTCOMES:
            print(f"    {number} {what}")
    for what, number in sorted(ranks.counters.items()):
        print(f"    {number} {what} (all ranks)")
