"""The process groups of transfers: over exactly the ranks that take part, and used for nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._logging import trace_structured
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup

from ..distributed import config
from ..distributed._mesh.text import of_ranks
from ..distributed.distributed_c10d import MemberNames
from ._planner.schedule import ROUNDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from ._planner.routes import Move
    from ._planner.schedule import Schedule
    from .meeting import Team


plan_logger = logging.getLogger("torch_overlay.transfers")


def tell(name: str, describe: Callable[[], str]) -> None:
    """A DEBUG line, and an artifact that tlparse shows by this name.

    Args:
        describe: gives the plan in words; called only if somebody wants to know.
    """
    if plan_logger.isEnabledFor(logging.DEBUG):
        plan_logger.debug("planned %s", describe())
    about = {"name": name, "encoding": "string"}
    trace_structured("artifact", lambda: about, payload_fn=describe, expect_trace_id=False)


DESCRIPTION = "torch_overlay_transfer"  # what c10d calls these groups, in its logs and its flight recorder
logger = logging.getLogger(__name__)
_names: WeakKeyDictionary[ProcessGroup, MemberNames] = WeakKeyDictionary()
_kept: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def new_group(ranks: Sequence[int], callers: Sequence[int], timeout: timedelta) -> ProcessGroup | None:
    """A group over these ranks, made by them where the backend lets members make one alone, else by the whole world;
    None on a rank outside.

    Raises:
        RuntimeError: the world must make it, and some ranks of it don't call this.
    """
    world = distributed_c10d._get_default_group()
    alone = not config.use_torchcomms and "mpi" not in distributed_c10d.get_backend(world)
    if alone and dist.get_rank() not in ranks:
        return None
    if not alone and len({*callers}) < world.size():
        raise RuntimeError(
            f"All {world.size()} ranks have to make the process group of a transfer on this backend, "
            f"{distributed_c10d.get_backend(world)}, and it is made by {of_ranks(sorted(callers))} alone. Make a "
            "Transfer on all of them (group=None), with None for a side that a rank has no part in."
        )
    name = _names.setdefault(world, MemberNames("transfer")).next(ranks)
    how = {"timeout": timeout, "use_local_synchronization": alone, "group_desc": DESCRIPTION}
    made = _new_group_called(name)(list(ranks), **how)
    if made == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("made %s, the process group %r of %s", made.group_desc, made.group_name, of_ranks(ranks))
    return made


def _new_group_called(name: str) -> Callable[..., Any]:
    """What is behind `new_group`, for a group of this name that isn't split from the world's.

    c10d names a group that its members make by what else this rank has made, so that ranks whose histories differ wait
    for one another under two names; and it takes no name. Where the world is bound to its devices, it splits the
    world's communicator, in which every rank has to take part. It asks for both by functions of its module: this is the
    same code, and finds others there. Nothing that other threads use is changed.
    """
    makes = _copied(unwrap(distributed_c10d._new_process_group_helper), _get_split_source=lambda *_: None)
    return _copied(
        unwrap(distributed_c10d._new_group_with_tag),
        _process_group_name=lambda ranks, use_hashed_name: name,
        _new_process_group_helper=makes,
    )


def _copied(function: Any, **others: Callable[..., Any]) -> Callable[..., Any]:
    """The same code, for which its module has these other functions."""
    found = {**function.__globals__, **others}
    made = FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def kept_group(ranks: Sequence[int]) -> ProcessGroup | None:
    """The group by which redistributions over these ranks go from mesh to mesh, kept by the world."""
    world = distributed_c10d._get_default_group()
    known = _kept.setdefault(world, {})
    group = known.get(tuple(ranks))
    if group is None or group not in distributed_c10d._world.pg_map:
        group = new_group(ranks, ranks, timeout_of(world))
        if group is not None:
            known[tuple(ranks)] = group
    return group


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long the ranks of a group wait for one another."""
    for device in sorted(group._device_types, key=str):  # the host's memory first; whatever else this host has
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout


Traffic = dict[int, tuple[int, int, int]]


def most_bytes(moves: Iterable[Move], ranks: Sequence[int]) -> int:
    """Bytes that no rank has more of to send and to get in these moves; every rank finds the same."""
    most = ROUNDED * 2 * len(ranks)
    for move in moves:
        most += move.itemsize * (len(ranks) * move.source.regions.most + move.target.regions.most)
    return most


def agreed_count(
    schedule: Schedule, budget: int, team: Team, device: torch.device, is_wrong: bool = False
) -> tuple[int, Traffic]:
    """How many exchanges there are: as many as the rank needs that needs most, none if all is in place. And by rank,
    what it sends, what it gets, and the exchanges that it needs.

    One collective, for which the host waits once. What is wrong on a rank travels with it, so that no rank begins with
    what some of them can't do: that holds on backends, too, whose `wait` doesn't block the host.

    Raises:
        RuntimeError: something is wrong on some rank; on all of them.
        ValueError: the budget is too small for some rank; on all of them.
    """
    problem = ""
    try:
        least = schedule.least(budget)
    except ValueError as error:
        least, problem = -1, str(error)
    words = torch.tensor([int(is_wrong), schedule.sent, schedule.received, least], device=device)
    said: list[list[int]] = team.gathered(words).tolist()
    wrong = [rank for rank, (first, *_) in zip(team.ranks, said) if first]
    if wrong:
        raise RuntimeError(f"Nothing was redistributed: {of_ranks(wrong)} can't.")
    traffic: Traffic = {rank: (out, into, needed) for rank, (_, out, into, needed) in zip(team.ranks, said)}
    small = [rank for rank, (*_, needed) in traffic.items() if needed < 0]
    if small:
        raise ValueError(problem or f"A budget of {budget} bytes is too small for {of_ranks(small)}.")
    is_idle = not any(sent for sent, *_ in traffic.values())
    return 0 if is_idle else max(needed for *_, needed in traffic.values()), traffic
