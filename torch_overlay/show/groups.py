"""Lists the process groups that meshes have in this process, for `status().all()`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import distributed_c10d

from ..distributed._mesh.text import of_ranks
from ..distributed._mesh.universe import GroupTable, Universe, current_world
from .words import counted


@dataclass(frozen=True)
class GroupRow:
    """One group that this rank is in.

    Attributes:
        ranks: in the group's order.
        name: the name of the axes and views that may share it; None if any axis over these ranks may.
        axes: the axes that use it.
        joint: True if redistributions over several axes use it.
        gone: True if somebody destroyed it.
    """

    ranks: tuple[int, ...]
    name: str | None
    axes: tuple[str, ...]
    joint: bool
    gone: bool

    def __str__(self) -> str:
        kind = "redistributions over " if self.joint else "axis " if len(self.axes) == 1 else "axes "
        name = f", named {self.name}" if self.name is not None and self.axes != (self.name,) else ""
        return f"{kind}{', '.join(self.axes)}{name}: {of_ranks(self.ranks)}{', destroyed' if self.gone else ''}"


@dataclass(frozen=True)
class UniverseRow:
    """The groups of one root mesh and its views.

    Attributes:
        title: the mesh, as text.
        by_default: the axes that use the default group.
        groups: the other groups.
        joinable: names with groups over equal ranks. ``share_groups="ranks"`` would give them one group.
    """

    title: str
    by_default: tuple[str, ...]
    groups: tuple[GroupRow, ...]
    joinable: tuple[tuple[str, ...], ...]

    @property
    def saved(self) -> int:
        """How many communicators ``share_groups="ranks"`` would save in this universe."""
        return sum(len(names) - 1 for names in self.joinable)

    def __str__(self) -> str:
        lines = [self.title]
        if self.by_default:
            lines.append(f"  the default group serves {', '.join(self.by_default)}")
        lines += [f"  {row}" for row in self.groups]
        if self.saved:
            joined = "; ".join(" with ".join(names) for names in self.joinable)
            lines.append(f'  share_groups="ranks" would save {counted(self.saved, "communicator")}: {joined}')
        return "\n".join(lines)


@dataclass(frozen=True)
class Listing:
    """The groups of every universe of this world."""

    universes: tuple[UniverseRow, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.universes)) or "none"


def listing() -> Listing | None:
    """The groups that this rank has now; None without a world. Universes without any are left out."""
    if not distributed_c10d.is_initialized():
        return None
    rows = tuple(_universe_row(universe) for universe in current_world().universes)
    return Listing(tuple(row for row in rows if row.groups or row.by_default))


def _universe_row(universe: Universe) -> UniverseRow:
    """The groups of a universe that hold this rank, and which names share_groups="ranks" would give one group."""
    joint = {name for name in universe.joint.values() if name}
    title = f"{'private ' if universe.private else ''}mesh {universe.number} over {of_ranks(universe.rank_map.ranks())}"
    groups = tuple(_rows(universe.table, joint))
    # Axes of one rank are left out: their groups have no communicator that sharing could save.
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for key, entry in list(universe.table.entries.items()):  # a copy, since another thread may make a group meanwhile
        if entry.group_name and len(key.ranks) > 1 and key.name is not None:
            alike[key.ranks, key.kind].append(key.name)
    joinable = tuple(tuple(names) for names in alike.values() if len(names) > 1)
    return UniverseRow(title, tuple(universe.by_default), groups, joinable)


def _rows(table: GroupTable, joint: set[str]) -> Iterator[GroupRow]:
    """The groups in a universe's table that hold this rank."""
    for key, entry in list(table.entries.items()):  # a copy, as above
        if entry.group_name:
            is_joint, gone = entry.group_name in joint, entry.group is None
            yield GroupRow(tuple(key.ranks), key.name, tuple(entry.names), is_joint, gone)
