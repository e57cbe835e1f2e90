"""Who builds which mesh: told when a rank waits long, and compared before groups are
made if that is asked for.

Before it makes groups, each rank puts one line about its mesh into the default group's
store: one `set` a mesh, under one key a rank, which the next line replaces. A rank that
has waited for `SECONDS` reads the lines of the others and logs a warning if they
differ. That never raises, and nothing depends on what was read.

With ``mesh_check``, rank 0 compares the lines and answers all ranks, so that a mismatch
is an error on every rank and not a hang. It costs each rank five store operations a
mesh, and rank 0 two more for each rank; and the same once for each world, in which
ranks compare their settings. If all ranks came, nothing stays in the store. If some
didn't, those who waited leave a count, by which a later world on this store uses other
keys.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.distributed import DistNetworkError, distributed_c10d

from .. import config  # overlay only
from .text import of_ranks
from .universe import current_world, get_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup


SECONDS = 5.0  # of waiting, before a rank reads what others build
SPREAD = 0.001  # seconds for each rank before it, so that a store serves few at a time
MOST = 256  # ranks whose lines are read
SWITCH = "mesh_check"  # compares meshes before groups are made
SWITCH = "check_mesh=True, or TORCH_OVERLAY_CHECK_MESH=1,"  # overlay only

logger = logging.getLogger(__name__)


def leave_line(describe: Callable[[], str]) -> None:
    """Let other ranks find what this one is about to build. A mesh that comes again
    says how often it came.

    Args:
        describe: gives one readable line, the same on all ranks that build this mesh.
    """
    world = distributed_c10d._get_default_group()
    if not _can_wait(world):
        return
    with contextlib.suppress(Exception):
        ours, line = current_world(), describe()
        ours.lines[line] += 1
        ours.line = (
            line
            if ours.lines[line] == 1
            else f"{line} for the {_th(ours.lines[line])} time"
        )
        distributed_c10d._world.pg_map[world][1].set(_key(world.rank()), ours.line)


@contextlib.contextmanager
def explained(wait: Callable[[], tuple[str, Sequence[int]]]) -> Iterator[None]:
    """While the block waits for other ranks: if that takes long, log once who builds
    what.

    Args:
        wait: gives what other ranks are to do, and who take part, those first that are
            waited for now; called only if that takes long.
    """
    timer = None
    with contextlib.suppress(Exception):
        timer = _timer(wait)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
            # it reads for some milliseconds; where the store is gone, it isn't waited
            # for
            timer.join(1)


def _timer(wait: Callable[[], tuple[str, Sequence[int]]]) -> threading.Timer | None:
    world = distributed_c10d._get_default_group()
    if not _can_wait(world):
        return None
    rank, line = world.rank(), current_world().line
    # stubs have no clone()
    store = cast("Any", distributed_c10d._world.pg_map[world][1])

    def explain() -> None:
        with contextlib.suppress(Exception):
            what, ranks = wait()
            asked = [*dict.fromkeys(ranks)][:MOST]
            # the store's own client may be what waits
            said = who_builds(store.clone(), asked)
            if any(theirs != line for theirs in said) and not timer.finished.is_set():
                logger.warning(_explanation(rank, line, what, said))

    timer = threading.Timer(SECONDS + SPREAD * rank, explain)
    timer.daemon = True
    timer.start()
    return timer


def _can_wait(world: ProcessGroup) -> bool:
    """Whether there is somebody to wait for, and a store through which all ranks
    talk."""
    return world.size() > 1 and distributed_c10d.get_backend(world) not in (
        "fake",
        "mpi",
    )


def _key(rank: int) -> str:
    return f"mesh_line/{rank}"


def who_builds(store: Any, ranks: Sequence[int]) -> dict[str | None, list[int]]:
    """Who left which line last, None for none. It asks for no key that isn't there, and
    so waits for nobody."""
    there = _there(store, ranks)
    keys = [_key(rank) for rank in there]
    words = (
        store.multi_get(keys)
        if keys and store.has_extended_api()
        else map(store.get, keys)
    )
    lines = dict(zip(there, words))
    said: dict[str | None, list[int]] = {}
    for rank in sorted(ranks):
        said.setdefault(lines[rank].decode() if rank in lines else None, []).append(
            rank
        )
    return said


def _there(store: Any, ranks: Sequence[int]) -> list[int]:
    """Those who left a line, by one request for all or by halves."""
    if not ranks or store.check([_key(rank) for rank in ranks]):
        return [*ranks]
    if len(ranks) == 1:
        return []
    half = len(ranks) // 2
    return _there(store, ranks[:half]) + _there(store, ranks[half:])


def _explanation(
    rank: int, line: str | None, what: str, said: dict[str | None, list[int]]
) -> str:
    own = said.get(line, [rank])
    parts = [f"{of_ranks(own)} build{'s' if len(own) == 1 else ''} {line}"]
    others = {
        theirs: ranks for theirs, ranks in said.items() if theirs not in (line, None)
    }
    parts += [
        f"{of_ranks(ranks)} came last to {theirs}" for theirs, ranks in others.items()
    ]
    if None in said:
        parts.append(f"{of_ranks(said[None])} came to no mesh yet")
    return (
        f"Rank {rank} has waited {SECONDS:g} s for other ranks to {what}, and not all "
        "of them are at the same mesh: "
        f"{'; '.join(parts)}. All ranks of a mesh must build the same meshes in the "
        "same order. It waits on, as long "
        f"as the timeout allows; with {SWITCH} a mesh that differs is an error at once."
    )


def _th(number: int) -> str:
    """A number in words for people: 2nd, 3rd, 11th."""
    ending = (
        "th"
        if number % 100 in (11, 12, 13)
        else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"


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
    """Raise on every rank unless all ranks of the world come here with the same line;
    off unless asked for.

    Args:
        describe: gives what must agree, readable and complete; called only if it is
            asked for.

    Raises:
        RuntimeError: ranks differ, or some didn't come within the default group's
            timeout; names the ranks.
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
    """How often ranks of earlier worlds on this store gave up, and left lines; the same
    on all ranks of this world, who met after that."""
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
                "Ranks compare their meshes before making groups, and rank 0 didn't "
                f"answer within {seconds:g} s. "
                f"This rank {words.some}s {line}. See whether rank 0 died or skips "
                "this mesh."
            )
    store.delete_key(f"{prefix}/{world.rank()}")
    if store.add(f"{prefix}/left", 1) == world.size():
        store.delete_key(f"{prefix}/verdict")
        store.delete_key(f"{prefix}/left")
    if verdict != "same":
        raise RuntimeError(
            f"{verdict} This rank, {world.rank()}, {words.some}s {line}."
        )


def _timeout_seconds(world: distributed_c10d.ProcessGroup) -> float:
    store: Any = distributed_c10d._world.pg_map[world][1]
    timeout = store.timeout
    for device in world._device_types:
        # a backend without options
        with contextlib.suppress(RuntimeError, AttributeError):
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


def _verdict(
    store: distributed_c10d.Store, prefix: str, size: int, seconds: float, words: Words
) -> str:
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
            f"{_NOT_ALL}: all {size} ranks must build the same meshes in the same "
            f"order, and {of_ranks(missing)} "
            f"didn't come to one within {seconds:g} s. See whether they died or skip "
            "it."
        )
    if len(said) == 1:
        return "same"
    views = "; ".join(
        f"{of_ranks(ranks)} {words.some}{'s' if len(ranks) == 1 else ''} {line}"
        for line, ranks in said.items()
    )
    return f"All {size} ranks must {words.all}, and they differ: {views}."
