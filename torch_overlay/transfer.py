"""`Transfer`: many tensors from one mesh to another, planned once and run often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .distributed._rank_map import short
from .show.columns import aligned
from .transfers._planner.schedule import Schedule
from .transfers._planner.sides import Move, Ranks, Side
from .transfers.descriptions import SIDES, Tensor, agreed, describe, own_tensors, sides_of
from .transfers.exchanges import Exchanges, Torn
from .transfers.groups import Traffic, agreed_count, new_group
from .transfers.meeting import Meeting
from .transfers.pending import reduced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

BUDGET = 256 << 20  # bytes


class Transfer:
    """The tensors of one tree, written into those of another, on the same ranks or on others.

        sync = torch_overlay.Transfer(trainer.state_dict(), generator.state_dict(), budget=256 << 20)
        sync.run()  # every step, into the generator's tensors

    Both trees are dicts, lists and tuples of DTensors, nested as they come; tensors with the same path belong together.
    A rank gives the tensors that it has a part in, and None, for a tensor or for a whole side, where it has none: ranks
    of the source's meshes send, ranks of the target's receive, ranks of both do both. The targets may be any views.

    Making one is collective over `group` and plans everything; it compares what the ranks say of both sides. It has a
    process group of its own, over the ranks of both sides, until `close` or the end of a `with`. `run` is collective
    over those; it reads the sources and writes the targets that they have then.

    Each element goes once to each rank that lacks it, from one of those that have it, in as few exchanges as the budget
    allows. Where a reduction is pending on a source, the source mesh does it first.

    Args:
        source, target: what is read, and what is written.
        budget: the bytes that buffers may take on a rank. A pending reduction takes its result in addition.
        group: whose ranks make the Transfer, those of both sides among them; or a list of these ranks. All ranks of the
            world if not given.
        names: from a path of the source to the path of the target that it goes to.

    Raises:
        ValueError: the sides don't fit, on every rank; names the tensors. Or the budget is too small.
        RuntimeError: a rank didn't come within the group's timeout; says which.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        *,
        budget: int = BUDGET,
        group: ProcessGroup | Sequence[int] | None = None,
        names: Callable[[str], str] | None = None,
    ) -> None:
        rank = dist.get_rank()
        meeting = Meeting(group, "A Transfer")
        said = meeting.say(describe(source, target, names))
        self.budget = budget
        self.tensors: list[Tensor] = agreed(said)
        members = {rank for tensor in self.tensors for side in (tensor.source, tensor.target) for rank in side.ranks}
        self.ranks: list[int] = sorted(members)
        self._group = new_group(self.ranks, meeting.timeout) if self.tensors else None
        self._is_closed = False
        self.traffic: Traffic = {}
        if rank not in members or self._group is None:
            return
        sides = own_tensors(source, SIDES[0], names), own_tensors(target, SIDES[1])
        self._sources, self._targets = ([side.get(tensor.name) for tensor in self.tensors] for side in sides)
        self._pending = [n for n, tensor in enumerate(self.tensors) if tensor.source.regions.pending]
        schedule = Schedule.of(_moves(self.tensors), rank)
        device = torch.device(self.tensors[0].source.device)
        count, self.traffic = agreed_count(schedule, budget, self._group, device)
        self._exchanges = Exchanges(schedule, count, self._group, device)

    @property
    def exchanges(self) -> int:
        """How many exchanges a run takes; 0 on a rank that has no part in it."""
        return self._exchanges.count if self.traffic else 0

    @property
    def staging(self) -> int:
        """The most bytes that a run has in buffers on this rank."""
        return self._exchanges.staging if self.traffic else 0

    @torch.no_grad()
    def run(self) -> None:
        """Bring the sources' values into the targets. Collective over the ranks of both sides.

        Raises:
            RuntimeError: the Transfer is closed, or a rank failed; says whether targets were written.
        """
        if self._is_closed:
            raise RuntimeError("This Transfer is closed, and its process group with it. Make another one.")
        if not self.traffic:
            return
        sources = [_local(tensor) for tensor in self._sources]
        own = [(n, self._sources[n], self.tensors[n].source.regions) for n in self._pending]
        for number, local in reduced(
            [(n, t, r) for n, t, r in own if t is not None and sources[n] is not None]
        ).items():
            sources[number] = local
        try:
            self._exchanges.run(sources, [_local(tensor) for tensor in self._targets])
        except RuntimeError as error:
            state = (
                "some targets are new and others not, or half so"
                if isinstance(error, Torn)
                else "no target was written"
            )
            raise RuntimeError(f"A Transfer over ranks {short(self.ranks)} failed, and {state}: {error}") from error

    def close(self) -> None:
        """Destroy the Transfer's process group. Again does nothing."""
        if not self._is_closed and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._is_closed = True

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        sources = {rank for tensor in self.tensors for rank in tensor.source.ranks}
        targets = {rank for tensor in self.tensors for rank in tensor.target.ranks}
        lines = [
            f"{len(self.tensors)} tensors from ranks {short(sorted(sources))} to ranks {short(sorted(targets))}, "
            f"budget {_amount(self.budget)}"
        ]
        if not self.traffic:
            return f"{lines[0]}; this rank has no part in it"
        lines.append(f"{self.exchanges} exchanges; buffers of {_amount(self.staging)} on this rank at most")
        rows = [("rank", "sends", "gets")]
        rows += [(str(rank), _amount(out), _amount(into)) for rank, (out, into, _) in self.traffic.items()]
        return "\n".join(
            lines + aligned(rows[:33], right=(0, 1, 2)) + ([f"... {len(rows)} ranks"] if rows[33:] else [])
        )


def _local(tensor: DTensor | None) -> torch.Tensor | None:
    """What a rank holds now; of a mesh that it isn't in, nothing."""
    if tensor is None or tensor.device_mesh.get_coordinate() is None:
        return None
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _moves(tensors: Sequence[Tensor]) -> list[Move]:
    meshes: dict[Any, Ranks] = {}
    moves = []
    for tensor in tensors:
        ranks = sides_of(tensor, meshes)
        source = tensor.source.regions.without_pending(tensor.source.regions.pending)
        width = getattr(torch, tensor.source.dtype).itemsize
        moves.append(Move(Side(source, ranks[0]), Side(tensor.target.regions, ranks[1]), width))
    return moves


def _amount(size: int) -> str:
    """Bytes for people.

    >>> _amount(1000), _amount(3 << 20)
    ('1000 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024  # type: ignore[assignment]
    return f"{size} B" if unit == "B" else f"{size:.1f} {unit}"
