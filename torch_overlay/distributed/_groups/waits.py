"""Say who builds what when a rank waits long for the groups of its mesh, so that a hang explains itself.

Before it makes groups, each rank puts a line about its mesh into the default group's store: one `set` a mesh, under one
key a rank, which the next line replaces. Who has waited for `SECONDS` reads the lines that are there, and logs a
warning if they differ. Nothing here raises, and nothing depends on what was read. A later world on the same store finds
the lines of this one, until its ranks come to a mesh.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import distributed_c10d

from .._mesh.rank_map import of_ranks
from .universe import current_world

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
    """Let other ranks find what this one is about to build. A mesh that comes again says how often it came.

    Args:
        describe: gives one readable line, the same on all ranks that build this mesh.
    """
    world = distributed_c10d._get_default_group()
    if not _can_wait(world):
        return
    with contextlib.suppress(Exception):
        ours, line = current_world(), describe()
        ours.lines[line] += 1
        ours.line = line if ours.lines[line] == 1 else f"{line} for the {_th(ours.lines[line])} time"
        distributed_c10d._world.pg_map[world][1].set(_key(world.rank()), ours.line)


@contextlib.contextmanager
def explained(wait: Callable[[], tuple[str, Sequence[int]]]) -> Iterator[None]:
    """While the block waits for other ranks: if that takes long, log once who builds what.

    Args:
        wait: gives what other ranks are to do, and who take part, those first that are waited for now; called only if
            that takes long.
    """
    timer = None
    with contextlib.suppress(Exception):
        timer = _timer(wait)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
            timer.join(1)  # it reads for some milliseconds; where the store is gone, it isn't waited for


def _timer(wait: Callable[[], tuple[str, Sequence[int]]]) -> threading.Timer | None:
    world = distributed_c10d._get_default_group()
    if not _can_wait(world):
        return None
    rank, line = world.rank(), current_world().line
    store = cast("Any", distributed_c10d._world.pg_map[world][1])  # stubs have no clone()

    def explain() -> None:
        with contextlib.suppress(Exception):
            what, ranks = wait()
            asked = [*dict.fromkeys(ranks)][:MOST]
            said = who_builds(store.clone(), asked)  # the store's own client may be what waits
            if any(theirs != line for theirs in said) and not timer.finished.is_set():
                logger.warning(_explanation(rank, line, what, said))

    timer = threading.Timer(SECONDS + SPREAD * rank, explain)
    timer.daemon = True
    timer.start()
    return timer


def _can_wait(world: ProcessGroup) -> bool:
    """Whether there is somebody to wait for, and a store through which all ranks talk."""
    return world.size() > 1 and distributed_c10d.get_backend(world) not in ("fake", "mpi")


def _key(rank: int) -> str:
    return f"mesh_line/{rank}"


def who_builds(store: Any, ranks: Sequence[int]) -> dict[str | None, list[int]]:
    """Who left which line last, None for none. It asks for no key that isn't there, and so waits for nobody."""
    there = _there(store, ranks)
    keys = [_key(rank) for rank in there]
    words = store.multi_get(keys) if keys and store.has_extended_api() else map(store.get, keys)
    lines = dict(zip(there, words))
    said: dict[str | None, list[int]] = {}
    for rank in sorted(ranks):
        said.setdefault(lines[rank].decode() if rank in lines else None, []).append(rank)
    return said


def _there(store: Any, ranks: Sequence[int]) -> list[int]:
    """Those who left a line, by one request for all or by halves."""
    if not ranks or store.check([_key(rank) for rank in ranks]):
        return [*ranks]
    if len(ranks) == 1:
        return []
    half = len(ranks) // 2
    return _there(store, ranks[:half]) + _there(store, ranks[half:])


def _explanation(rank: int, line: str | None, what: str, said: dict[str | None, list[int]]) -> str:
    own = said.get(line, [rank])
    parts = [f"{of_ranks(own)} build{'s' if len(own) == 1 else ''} {line}"]
    others = {theirs: ranks for theirs, ranks in said.items() if theirs not in (line, None)}
    parts += [f"{of_ranks(ranks)} came last to {theirs}" for theirs, ranks in others.items()]
    if None in said:
        parts.append(f"{of_ranks(said[None])} came to no mesh yet")
    return (
        f"Rank {rank} has waited {SECONDS:g} s for other ranks to {what}, and not all of them are at the same mesh: "
        f"{'; '.join(parts)}. All ranks of a mesh must build the same meshes in the same order. It waits on, as long "
        f"as the timeout allows; with {SWITCH} a mesh that differs is an error at once."
    )


def _th(number: int) -> str:
    """A number in words for people: 2nd, 3rd, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
