"""Gloo ranks as processes that a parent hands cases, one at a time, so that wrong, raised and hung can be told apart.

Each rank answers for itself. A rank that doesn't answer in time hangs: all are killed and new ones start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import logging
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch_overlay.testing.pool import Pool, RankError

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
    """Processes of one world; `ask` runs a case on all of them, which may take a rank so many seconds. `unplanned`: by
    torch's own steps. In a world that is `bound` to its rank's device NCCL's groups are splits."""

    def __init__(self, size: int, stock: bool, seconds: float, device: str = "cpu", **how: Any):
        self.size, self.seconds, self.device = size, seconds, device
        world = dict(unplanned=False, backend="gloo", ranks_per_gpu=1, bound=False)
        self._how = world | dict(size=size, stock=stock, device=device) | how
        self.starts = self._asked = 0
        self.counters: Counter[str] = Counter()
        self._pool: Pool | None = None

    def ask(self, case: Any) -> tuple[str, Any]:
        """The worst of what came of a case, and its text, or figures of the first rank. Ranks that a case says die in
        it (``dies``) owe no answer. RankError if the ranks didn't come up."""
        if self._asked == CASES_PER_WORLD[self.device]:
            self.stop()
        if self._pool is None:
            self._pool = self._start()
        self._asked += 1
        self._pool.tell("answer", case)
        all_answers = self._pool.answers("answer", timeout=self.seconds, grace=self.seconds)
        answers = {rank: answer for rank, answer in all_answers.items() if not isinstance(answer, RankError)}
        silent = sorted(all_answers.keys() - answers.keys() - {*getattr(case, "dies", ())})
        bad = {rank: answer for rank, answer in answers.items() if answer[0] != "right"}
        raised = [rank for rank, answer in bad.items() if answer[0] == "raised"]
        if silent or 0 < len(raised) < self.size:
            self.stop(kill=True)  # the ranks' groups may be out of step
        if silent and not raised:
            return "hung", f"ranks {silent}: {all_answers[silent[0]]}"
        if not bad:
            return "right", answers[min(answers)][1] if answers else ""
        rank = min(raised or bad)
        return bad[rank][0], f"rank {rank}: {bad[rank][1]}"

    def stop(self, kill: bool = False) -> None:
        """End the processes, adding what they counted; with `kill`, at once."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if not kill:
            pool.tell("counted")
            for counted in pool.answers("counted", timeout=self.seconds).values():
                self.counters.update({} if isinstance(counted, RankError) else counted)
        pool.close(force=kill)

    def _start(self) -> Pool:
        # Forked, for a spawned rank imports torch, and with the first DTensor torch._dynamo, for many seconds; the
        # parent only imports them and runs nothing.
        import twins_ranks  # noqa: F401

        if os.environ.get("TORCH_OVERLAY_TEST") == "patched":
            import way  # noqa: F401  # a torch that carries our code: enable() sets its options

        self.starts, self._asked = self.starts + 1, 0
        file = os.path.join(tempfile.mkdtemp(), "store")
        rounds = self.starts % 2 == 0
        pool = Pool(
            self.size, _Rank, {**self._how, "file": file, "rounds": rounds}, timeout=START_SECONDS, method="fork"
        )
        pool.ask("ready")
        return pool


class _Rank:
    """One rank: case after case, with the meshes kept; with `rounds`, small tensors go in as many as large ones do."""

    def __init__(self, rank: int, how: dict[str, Any]) -> None:
        import torch

        self.rank, self.stock = rank, how["stock"]
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        if not self.stock:
            import torch_overlay

            torch_overlay.enable()
            if how["unplanned"]:
                _plan_nothing()
            if how["rounds"]:
                from torch_overlay.distributed.tensor._planner import cost

                cost._ASSUMED = {"cpu": cost.Cost(round_bytes=1)}  # on other devices as there
        device, size = self._open_world(**how), how["size"]
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (2, size // 2) if size % 2 == 0 else (size,)
        neighbour = init_device_mesh(device, sizes, mesh_dim_names=("x", "y")[: len(sizes)])
        self.meshes: dict[Any, Any] = {NEIGHBOUR: neighbour}

    def _open_world(
        self, size: int, backend: str, device: str, ranks_per_gpu: int, bound: bool, file: str, **_: Any
    ) -> str:
        """Returns the type of this rank's device."""
        import torch
        import torch.distributed as dist

        own = torch.device(f"cuda:{self.rank // ranks_per_gpu}" if device == "cuda" else device)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        world: dict[str, Any] = {"device_id": own} if bound else {}
        world |= {"store": dist.FileStore(file, size), "timeout": datetime.timedelta(seconds=60)}
        dist.init_process_group(backend, rank=self.rank, world_size=size, **world)
        return own.type

    def ready(self) -> None:
        pass

    def answer(self, case: Any) -> tuple[str, Any]:
        try:
            if not self.stock:
                import torch_overlay

                torch_overlay.enable(flatten=case.flatten)
            key = case.mesh, case.flatten  # the option says which groups are made with a mesh
            if key not in self.meshes:
                self.meshes[key] = case.mesh.make(self.meshes[NEIGHBOUR].device_type)
            from twins_ranks import bytes_decide

            with bytes_decide() if case.bytes_only and not self.stock else contextlib.nullcontext():
                if case.beside:
                    told = _beside(self.meshes[NEIGHBOUR], lambda: case.problem(self.meshes[key], self.rank))
                else:
                    told = case.problem(self.meshes[key], self.rank)
        except Exception:  # whatever it is, the case is worth printing
            return "raised", traceback.format_exc()
        if isinstance(told, dict):  # figures of a case that isn't about right and wrong alone
            return "right", told
        return ("wrong", told) if told else ("right", "")

    def counted(self) -> dict[str, int]:
        if self.stock:
            return {}
        from torch_overlay.report import redistributions

        counts = redistributions()
        del counts["plans in the cache"], counts["collectives that more groups would save"]
        fallbacks: Any = counts.pop("redistributions by torch's own code")
        return {**counts, **{f"torch's own code: {why}": n for why, n in fallbacks.items()}}  # type: ignore[dict-item]


def _plan_nothing() -> None:
    from torch_overlay.distributed.tensor import _redistribute
    from torch_overlay.distributed.tensor._runner.answers import Fallback

    _redistribute.find_answer = lambda *_: Fallback("the search asks for torch's own steps")


def _beside(mesh: Any, work: Callable[[], str | None]) -> str | None:
    """What is wrong with work, or with sums over the axes of another mesh in a second thread at the same time."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    wrong: list[float] = []

    def sums() -> None:
        for step in range(4):
            local = torch.full((8,), float(step + 1), dtype=torch.float64, device=mesh.device_type)
            total = DTensor.from_local(local, mesh, [Partial()] * mesh.ndim, run_check=False)
            got = total.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
            if not torch.all(got == (step + 1) * mesh.size()):
                wrong.append(got[0].item())

    thread = threading.Thread(target=sums, daemon=True)
    thread.start()
    problem = work()
    thread.join(30)
    if thread.is_alive():
        return "a thread that uses another mesh hangs"
    return problem or (f"another mesh has {wrong} in a second thread" if wrong else None)


def run(size: int, cases: int, seed: int, seconds: float, stock: bool, limit: float, **world: Any) -> dict[str, Any]:
    """Run cases on that many ranks, print the first failures, and return the counts by side. With `alone` no case has a
    second thread with another mesh: some backends' communicators have one order everywhere."""
    from fuzz_cases import random_cases

    alone, unplanned = world.pop("alone", False), world.pop("unplanned", False)
    sides = {"overlay": Ranks(size, False, limit, unplanned=unplanned, **world)}
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
                said = next((said for words, said in SAID.items() if words in text), "else")
                counts[side][f"{outcome}: {said}"] += 1
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


def report(side: str, done: int, seed: int, counts: Counter[str], seconds: float, ranks: Ranks) -> None:
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    print(f"{side}: {done} cases, seed {seed}: {said}; {seconds:.1f} s, {ranks.starts} worlds")
    for name, number in sorted(counts.items()):
        if name not in OUTCOMES:
            print(f"    {number} {name}")
    for name, number in sorted(ranks.counters.items()):
        print(f"    {number} {name} (all ranks)")
