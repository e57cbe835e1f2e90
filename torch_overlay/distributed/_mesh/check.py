"""Compare ranks before groups are made, so that a mismatch is an error on every rank and not a hang.

Every rank puts a line about its mesh into the default group's store; rank 0 compares them and answers all. Costs each
rank five store operations a mesh, rank 0 two more for each rank; and the same once more for each world, in which ranks
compare what their groups and plans depend on beside the mesh. Where all ranks came, nothing is left in the store: a
later world may have the same one, and the same keys. Where some didn't, those who waited leave a count of that, by
which a later world on this store has other keys.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import DistNetworkError, distributed_c10d

from .. import config  # overlay only
from .._groups.settings import get_settings
from .._groups.universe import current_world
from .._groups.waits import explained
from .rank_map import of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


class Words(NamedTuple):
    """How an error speaks of what is compared.

    Attributes:
        all: what all ranks must do.
        some: what ranks do, followed by their line.
    """

    all: str
    some: str


MESH = Words("build the same mesh", "build")
PROCESS = Words("run with the same settings", "run")


def check_same_mesh(describe: Callable[[], str]) -> None:
    """Raise on every rank unless all ranks of the world come here with the same line; off unless asked for.

    Args:
        describe: gives what must agree, readable and complete; called only if it is asked for.

    Raises:
        RuntimeError: ranks differ, or some didn't come within the default group's timeout; names the ranks.
    """
    if not get_settings().mesh_check:
        return
    world = distributed_c10d._get_default_group()
    if world.size() == 1 or distributed_c10d.get_backend(world) in ("fake", "mpi"):
        return  # nobody to ask, or no store to ask through
    ours = current_world()
    ours.compared += 1  # before anything is compared: keys are used once
    with explained(lambda: ("compare meshes", range(world.size()))):
        if ours.compared == 1:
            ours.left_before = _left_before()
            _compare(f"mesh_check/{ours.left_before}/process", _process(), PROCESS)
        _compare(f"mesh_check/{ours.left_before}/{ours.compared}", describe(), MESH)


def _process() -> str:
    """What groups and plans depend on beside the meshes, as one line."""
    said = [f"{name}={value!r}" for name, value in get_settings()._asdict().items()]
    said.insert(0, config.build)  # overlay only
    return ", ".join(said)


_NOT_ALL = "Not all ranks came"
_GAVE_UP = "mesh_check/gave_up"


def _left_before() -> int:
    """How often ranks of earlier worlds on this store gave up, and left lines; the same on all ranks of this world, who
    met after that."""
    store = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()][1]
    return store.add(_GAVE_UP, 0) if store.check([_GAVE_UP]) else 0


def _compare(prefix: str, line: str, words: Words) -> None:
    world = distributed_c10d._get_default_group()
    store = distributed_c10d._world.pg_map[world][1]
    seconds = _timeout_seconds(world)
    store.set(f"{prefix}/{world.rank()}", line)
    verdict: str | None
    if world.rank() == 0:
        verdict = _verdict(store, prefix, world.size(), 0.8 * seconds, words)
        store.set(f"{prefix}/verdict", verdict)
        if verdict.startswith(_NOT_ALL):
            store.add(_GAVE_UP, 1)
    else:
        verdict = _read(store, f"{prefix}/verdict", seconds)
        if verdict is None:
            store.add(_GAVE_UP, 1)
            raise RuntimeError(
                f"Ranks compare their meshes before making groups, and rank 0 didn't answer within {seconds:g} s. "
                f"This rank {words.some}s {line}. See whether rank 0 died or skips this mesh."
            )
    store.delete_key(f"{prefix}/{world.rank()}")
    if store.add(f"{prefix}/left", 1) == world.size():
        store.delete_key(f"{prefix}/verdict")
        store.delete_key(f"{prefix}/left")
    if verdict != "same":
        raise RuntimeError(f"{verdict} This rank, {world.rank()}, {words.some}s {line}.")


def _timeout_seconds(world: distributed_c10d.ProcessGroup) -> float:
    store: Any = distributed_c10d._world.pg_map[world][1]
    timeout = store.timeout
    for device in world._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend without options
            timeout = min(timeout, world._get_backend(device).options._timeout)
    return max(1.0, timeout.total_seconds())


def _read(store: distributed_c10d.Store, key: str, seconds: float) -> str | None:
    """The value at ``key``, or None if nobody sets it in time."""
    try:
        if seconds <= 0 and not store.check([key]):
            return None
        store.wait([key], timedelta(seconds=max(0.1, seconds)))
    except DistNetworkError:
        raise  # there is no store any more
    except RuntimeError:
        return None
    return store.get(key).decode()


def _verdict(store: distributed_c10d.Store, prefix: str, size: int, seconds: float, words: Words) -> str:
    deadline = time.monotonic() + seconds
    said: dict[str, list[int]] = {}
    missing: list[int] = []
    for rank in range(size):
        line = _read(store, f"{prefix}/{rank}", deadline - time.monotonic())
        if line is None:
            missing.append(rank)
        else:
            said.setdefault(line, []).append(rank)
    if missing:
        return (
            f"{_NOT_ALL}: all {size} ranks must build the same meshes in the same order, and {of_ranks(missing)} "
            f"didn't come to one within {seconds:g} s. See whether they died or skip it."
        )
    if len(said) == 1:
        return "same"
    views = "; ".join(
        f"{of_ranks(ranks)} {words.some}{'s' if len(ranks) == 1 else ''} {line}" for line, ranks in said.items()
    )
    return f"All {size} ranks must {words.all}, and they differ: {views}."
