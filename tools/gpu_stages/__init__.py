"""The stages of `tools/one_gpu.py`: each is a function of a `Run` that gives what it finds, check by check.

A check runs on all ranks of a world of its own processes, as a case of `fuzz_ranks`: it gives what is wrong, or
nothing, or figures. One that hangs costs its own limit, and the next one gets new processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# What ranks would import each by itself, for seconds: they are forked and have it. None of it asks for a device.
import functorch.compile  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401
from fuzz_ranks import Ranks

from torch_overlay.testing.pool import RankError
from twins_ranks import MeshRecipe

RANKS = 4
NO_GPU = "skipped: needs a GPU"
BAD = ("wrong", "raised", "hung")
Found = dict[str, Any]  # check, outcome (right, one of BAD, or in words) and, where there is more to say, more


class Run(NamedTuple):
    device: str  # cuda, or cpu in a dry run
    ranks_per_gpu: int = RANKS  # how many ranks in a row share a device
    seconds: float = 40.0  # how long the ranks may take for a check
    nccl: dict[str, str] | None = None  # the settings that its first stage found, None before and where there are none

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    @property
    def best(self) -> str:
        """NCCL if it works here, else gloo."""
        return "gloo" if self.nccl is None or self.dry else "nccl"

    def world(self, backend: str, bound: bool = False) -> dict[str, Any]:
        return dict(backend=backend, device=self.device, ranks_per_gpu=self.ranks_per_gpu, bound=bound)


@dataclass(frozen=True)
class Check:
    """One call of a function on each rank of a mesh: ``function(mesh, rank, *arguments)``, read by `fuzz_ranks` as a
    case is."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    needs_gpu: bool = False
    mesh: MeshRecipe = MeshRecipe((0, 1, 2, 3), (2, 2))
    flatten: str = "whole"
    dies: tuple[int, ...] = ()
    bytes_only = False
    beside = False

    @property
    def name(self) -> str:
        return " ".join([self.function.__name__.replace("_", " "), *map(str, self.arguments)])

    def problem(self, mesh: Any, rank: int) -> Any:
        return self.function(mesh, rank, *self.arguments)


def asked(
    run: Run, checks: Iterable[Check], backend: str = "gloo", stock: bool = False, bound: bool = False
) -> Iterator[Found]:
    """What comes of these checks, in one world, or in several where one breaks it. What stock can't do fails no
    stage."""
    where = f"{'stock' if stock else 'overlay'} on {backend}" + (", bound to its device" if bound else "")
    ranks = Ranks(RANKS, stock, run.seconds, **run.world(backend, bound))
    for check in checks:
        answer: Found = {"check": check.name, "where": where}
        if check.needs_gpu and run.dry:
            yield answer | {"outcome": NO_GPU}
            continue
        begun = time.monotonic()
        try:
            outcome, more = ranks.ask(check)
        except RankError as error:  # not all of them came up
            ranks.stop(kill=True)
            outcome, more = "hung", str(error)
        if check.dies:
            ranks.stop(kill=True)
        if stock and outcome in BAD:
            outcome = f"{outcome} on stock"
        yield answer | {"outcome": outcome, "seconds": round(time.monotonic() - begun, 2)} | _said(more)
    ranks.stop()


def _said(more: Any) -> Found:
    if isinstance(more, dict):
        return {"figures": more}
    return {"text": more} if more else {}


def figures(answers: Sequence[Found]) -> list[Any]:
    return [one.get("figures") for one in answers]
