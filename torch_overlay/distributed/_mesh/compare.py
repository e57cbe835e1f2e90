"""Which rank builds which mesh: reported when a rank waits long, and compared before
groups are created if the user asks for it.

A rank that builds another mesh than its peers hangs in the creation of a group, and so
do they. Start at `leave_line` and `explained`: before it creates groups, each rank
stores its settings and its last meshes, a line for each, in the store of the default
group. That is one `set` for each mesh, under one key for each rank, which the next one
replaces. A rank that has waited for `SECONDS` reads the lines of the other ranks and
logs a warning if they differ. This never raises, and nothing depends on what was read.

`check_same_mesh` compares the same lines if the setting ``mesh_check`` is on. The rank
that comes last reads all of them and answers all ranks, so a mismatch is an error on
every rank and not a hang. If some don't come, the first rank that gives up answers. It
costs each rank four store operations for each mesh. If all ranks came, only their lines
stay in the store. If some didn't, a count stays, too, and a later world on this store
uses other keys.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from array import array
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.distributed import DistNetworkError, distributed_c10d

from .. import config  # overlay only
from .text import of_ranks
from .universe import current_world, get_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from .rank_map import RankMap


SECONDS = 5.0  # how long a rank waits before it reads the lines of others
# Seconds by which each rank reads later than the rank before it. Without this, all
# ranks of a large world would ask one store in the same moment.
SPREAD = 0.001
MOST = 256  # how many ranks' lines are read
KEPT = 8  # of how many meshes a rank's lines are stored
NAME = "torch_overlay: "  # upstream: ""
# How messages name the setting that compares meshes.
OPTION = "check_mesh=True, or TORCH_OVERLAY_CHECK_MESH=1,"  # upstream: "mesh_check"
WITHOUT = ", or run without torch_overlay"  # upstream: ""

logger = logging.getLogger(__name__)


def leave_line(describe: Callable[[], str], rank_map: RankMap) -> None:
    """Store one line about the mesh that this rank is about to build, for other ranks
    to read. A failure to store it is ignored, unless meshes are compared."""
    default_group = distributed_c10d._get_default_group()
    if not _can_wait(default_group):
        return
    # Where the line only serves a warning, a failure here must not stop the mesh.
    with contextlib.suppress(*([] if get_settings().mesh_check else [Exception])):
        world = current_world()
        home = _home(rank_map)
        world.built[home] += 1
        before = world.last_lines.split("\n")[1:][1 - KEPT :]
        entry = f"{home} {world.built[home]} {describe()}"
        world.last_lines = "\n".join([_settings_text(), *before, entry])
        distributed_c10d._world.pg_map[default_group][1].set(
            _line_key(default_group.rank()), world.last_lines
        )


def _settings_text() -> str:
    """The settings that groups and plans depend on beside the meshes."""
    settings = get_settings()._asdict()
    settings = config.as_options(settings)  # overlay only
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _home(rank_map: RankMap) -> str:
    """A text without spaces for the ranks of a map, whatever their order."""
    if rank_map.is_identity:
        return f"0-{rank_map.numel - 1}"
    ranks = sorted(rank_map.ranks())
    if ranks[-1] - ranks[0] + 1 == len(ranks):
        return f"{ranks[0]}-{ranks[-1]}"
    return f"{zlib.crc32(array('q', ranks).tobytes()):08x}"


class _Meshes(NamedTuple):
    """The last meshes of a rank, as it stored them.

    Attributes:
        home: the ranks of the last one, as `_home` has them.
        number: that of the last one among its meshes over these ranks, from 1.
        text: of the last one.
        by_number: the texts of its last meshes over the ranks asked for, by number.
        settings: of the rank.
    """

    home: str
    number: int
    text: str
    by_number: dict[int, str]
    settings: str

    @staticmethod
    def of(lines: str, home: str | None = None) -> _Meshes:
        settings, *meshes = lines.split("\n")
        entries = [line.split(" ", 2) for line in meshes]
        own, number, text = entries[-1]
        home = own if home is None else home
        by_number = {int(number): text for at, number, text in entries if at == home}
        return _Meshes(own, int(number), text, by_number, settings)

    def seen_from(self, other: _Meshes) -> str:
        """The last mesh, with what else differs: settings, or the number of meshes
        before."""
        known = other.settings.split(", ")
        settings = [s for s in self.settings.split(", ") if s not in known]
        text = self.text
        if text == other.text and self.number != other.number:
            text += f", its {_ordinal(self.number)} mesh of these ranks"
        return f"{text} with {', '.join(settings)}" if settings else text


@contextlib.contextmanager
def explained(wait: Callable[[], tuple[str, Sequence[int]]]) -> Iterator[list[str]]:
    """Run a block that waits for other ranks. If it takes longer than `SECONDS`, log
    once which rank builds what, if they differ."""
    timer = None
    found: list[str] = []
    with contextlib.suppress(Exception):
        timer = _start_timer(wait, found)
    try:
        yield found
    finally:
        if timer is not None:
            timer.cancel()
            # If it is reading right now, that takes milliseconds. If the store is gone,
            # it would take until the store's timeout, hence the limit.
            timer.join(1)


def _start_timer(
    wait: Callable[[], tuple[str, Sequence[int]]], found: list[str]
) -> threading.Timer | None:
    """Start the timer that logs the warning of `explained`, in another thread, whose
    errors are ignored: after `SECONDS`, later on higher ranks."""
    world = distributed_c10d._get_default_group()
    if not _can_wait(world):
        return None
    rank, lines = world.rank(), current_world().last_lines
    # Any: the stubs of Store have no clone().
    store = cast("Any", distributed_c10d._world.pg_map[world][1])

    def explain() -> None:
        with contextlib.suppress(Exception):
            what, ranks = wait()
            ranks_to_read = [*dict.fromkeys(ranks)][:MOST]
            # A clone: the store's own connection may be what the block waits on.
            ranks_by_lines = who_builds(store.clone(), ranks_to_read)
            ranks_by_lines.setdefault(lines, [rank])
            text = _who_builds_what(lines, ranks_by_lines)
            if text and not timer.finished.is_set():
                found.append(text)
                advice = f"; with {OPTION} a mesh that differs is an error at once"
                if get_settings().mesh_check:
                    advice = ""
                warning = (
                    f"{NAME}Rank {rank} has waited {SECONDS:g} s for other ranks to "
                    f"{what}, and not all of them are at the same mesh: {text} It "
                    f"waits on, as long as the timeout allows{advice}."
                )
                logger.warning(warning)

    timer = threading.Timer(SECONDS + SPREAD * rank, explain)
    timer.daemon = True  # a process that ends must not wait for it
    timer.start()
    return timer


def _can_wait(world: ProcessGroup) -> bool:
    """True if there are other ranks, and a store through which all ranks talk."""
    # Ranks of the fake backend don't exist, and MPI has no store.
    return world.size() > 1 and distributed_c10d.get_backend(world) not in (
        "fake",
        "mpi",
    )


def _line_key(rank: int) -> str:
    return f"mesh_line/{rank}"


def who_builds(store: Any, ranks: Sequence[int]) -> dict[str | None, list[int]]:
    """The ranks by the lines that they left (None: none); waits for no rank."""
    with_line = _ranks_with_line(store, ranks)
    keys = [_line_key(rank) for rank in with_line]
    values = (
        store.multi_get(keys)
        if keys and store.has_extended_api()
        else map(store.get, keys)
    )
    lines = dict(zip(with_line, values))
    ranks_by_line: dict[str | None, list[int]] = {}
    for rank in sorted(ranks):
        ranks_by_line.setdefault(
            lines[rank].decode() if rank in lines else None, []
        ).append(rank)
    return ranks_by_line


def _ranks_with_line(store: Any, ranks: Sequence[int]) -> list[int]:
    """Those of the ranks, in this order, that left a line. Waits for no rank: it reads
    no key that isn't set."""
    if not ranks or store.check([_line_key(rank) for rank in ranks]):
        return [*ranks]
    if len(ranks) == 1:
        return []
    # check() says only whether all keys are set. Halving takes few requests where few
    # are missing, which is the usual case.
    half = len(ranks) // 2
    return _ranks_with_line(store, ranks[:half]) + _ranks_with_line(store, ranks[half:])


def _who_builds_what(own: str, ranks_by_lines: dict[str | None, list[int]]) -> str:
    """Which ranks build which mesh, and where they parted; empty if none parted."""
    here = _Meshes.of(own)
    late: list[int] = []
    by_text: dict[str, list[int]] = defaultdict(list)
    by_number: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for lines, ranks in ranks_by_lines.items():
        if lines is None:
            late += ranks
            continue
        meshes = _Meshes.of(lines, here.home)
        reached = max(meshes.by_number, default=0)
        if reached < here.number:
            late += ranks
        is_ahead = meshes.by_number.get(here.number) == here.text and (
            meshes.number,
            meshes.text,
        ) != (here.number, here.text)
        verb = "went on" if is_ahead else "last came"
        seen = meshes.seen_from(here)
        by_text["" if seen == here.text else f" {verb} to {seen}"] += ranks
        for number, text in meshes.by_number.items():
            by_number[number][text] += ranks
    parted = min((n for n, texts in by_number.items() if len(texts) > 1), default=None)
    if list(by_text) == [""] and None not in ranks_by_lines and parted is None:
        return ""
    parts = [_do("build", by_text.pop(""), here.text)]
    parts += [f"{of_ranks(sorted(ranks))}{text}" for text, ranks in by_text.items()]
    if None in ranks_by_lines:
        parts.append(f"{of_ranks(ranks_by_lines[None])} came to no mesh yet")
    said = [f"{'; '.join(parts)}."]
    if parted is not None:
        if parted < max(by_number):
            others = by_number[parted].items()
            text = "; ".join(_do("build", ranks, mesh) for mesh, ranks in others)
            said.append(
                f"They parted at their {_ordinal(parted)} mesh of these ranks: {text}."
            )
        said.append("All ranks of a mesh must build the same meshes in the same order.")
    elif late:
        said.append(
            f"So far all meshes are the same: {of_ranks(sorted(late))} may be late, "
            f"wait elsewhere, or have died{WITHOUT}."
        )
    return " ".join(said)


def _do(verb: str, ranks: list[int], text: str) -> str:
    """ "rank 1 builds (a=2)" """
    return f"{of_ranks(sorted(ranks))} {verb}{'s' if len(ranks) == 1 else ''} {text}"


def _ordinal(number: int) -> str:
    """A number as people write it: 2nd, 3rd, 11th."""
    ending = (
        "th"
        if number % 100 in (11, 12, 13)
        else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"


_GAVE_UP = "mesh_check/gave_up"


def check_same_mesh() -> None:
    """Compare the lines that all ranks left last. Collective if ``mesh_check`` is
    on."""
    default_group = distributed_c10d._get_default_group()
    if not get_settings().mesh_check or not _can_wait(default_group):
        return
    store = distributed_c10d._world.pg_map[default_group][1]
    world, ranks = current_world(), range(default_group.size())
    if world.compared == 0 and store.check([_GAVE_UP]):
        # Earlier worlds on this store left keys. All ranks of this world read the same
        # number, since they met after that.
        world.left_before = store.add(_GAVE_UP, 0)
    world.compared += 1  # first: after an error, all ranks must use new keys
    prefix = f"mesh_check/{world.left_before}/{world.compared}"
    came, left, verdict = (f"{prefix}/{name}" for name in ("came", "left", "verdict"))
    seconds = _timeout_seconds(default_group)
    with explained(lambda: ("compare meshes", ranks)):
        # Of several answers the first one counts.
        if store.add(came, 1) == len(ranks):
            store.compare_set(verdict, "", _verdict(who_builds(store, ranks)))
        try:
            store.wait([verdict], timedelta(seconds=seconds))
        except DistNetworkError:
            raise  # the store is gone
        except RuntimeError:
            said = _who_builds_what(world.last_lines, who_builds(store, ranks))
            said = (
                f"Not all {len(ranks)} ranks came to compare their meshes within "
                f"{seconds:g} s. {said}"
            ).rstrip()
            if store.compare_set(verdict, "", said).decode() == said:
                store.add(_GAVE_UP, 1)
    text = store.get(verdict).decode()
    # Who leaves last removes the keys.
    if store.add(left, 1) == len(ranks):
        for key in (came, left, verdict):
            store.delete_key(key)
    if text != _SAME:
        mesh = _Meshes.of(world.last_lines).text
        raise RuntimeError(f"{text} This rank, {default_group.rank()}, builds {mesh}.")


_SAME = "same"


def _verdict(ranks_by_lines: dict[str | None, list[int]]) -> str:
    """`_SAME`, or a sentence that says which ranks have other settings or meshes."""
    by_settings: dict[str, list[int]] = defaultdict(list)
    by_mesh: dict[str, list[int]] = defaultdict(list)
    for lines, ranks in ranks_by_lines.items():
        meshes = _Meshes.of(cast("str", lines))
        by_settings[meshes.settings] += ranks
        by_mesh[meshes.text] += ranks
    for by_text, verb, wanted in (
        (by_settings, "run", "run with the same settings"),
        (by_mesh, "build", "build the same mesh"),
    ):
        if len(by_text) > 1:
            size = sum(map(len, by_text.values()))
            differences = "; ".join(
                _do(verb, ranks, text) for text, ranks in by_text.items()
            )
            return f"All {size} ranks must {wanted}, and they differ: {differences}."
    return _SAME


def _timeout_seconds(world: distributed_c10d.ProcessGroup) -> float:
    """The shortest timeout of the store and the default group, at least 1 second."""
    store: Any = distributed_c10d._world.pg_map[world][1]
    timeout = store.timeout
    for device in world._device_types:
        # Some backends have no options.
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout = min(timeout, world._get_backend(device).options._timeout)
    return max(1.0, timeout.total_seconds())
