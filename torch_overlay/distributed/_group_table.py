"""The groups that meshes made in one world: found by their ranks in mesh order, the backend and the options.

One table for each world (each default process group). Whether a request hits is decided from the key alone, and all
members of a group share the history that the key can have, so either all of them hit or all of them create. Groups that
the user made with ``dist.new_group`` never enter the table.
"""

from __future__ import annotations

import contextvars
import hashlib
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d

from ._layout import Layout, MeshLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import GroupName, ProcessGroup

    from ._mesh_input import Override
    from ._rank_map import RankMap
    from ._view import View

Key = tuple[tuple[int, ...], str, Any]

# What a backend writes into an options object when it makes a group, and so no part of what the user chose.
_WRITTEN_BY_CREATORS = {"global_ranks_in_group", "group_name", "split_from", "split_color", "enable_reconfigure"}

_lock = threading.RLock()

# On while a group is made for a mesh.
making_for_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("making_for_mesh", default=False)


@dataclass(eq=False)
class GroupTable:
    """The groups that meshes made in one world.

    Attributes:
        groups: by key; None stands for a group that was made and that this rank isn't in.
        names: the mesh axes that each group serves, in the order in which they asked.
        axes: by rank map, the layouts of the axes that got shared groups without options of their own; the same on
            every rank that makes the same mesh calls, whichever of the groups it is in.
        meshes: how many times ranks compared meshes (see `check_same_mesh`).
    """

    groups: dict[Key, ProcessGroup | None] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    axes: dict[RankMap, list[Layout]] = field(default_factory=dict)
    meshes: int = 0
    _named: Counter[tuple[bool, tuple[int, ...]]] = field(default_factory=Counter)
    _options: list[Any] = field(default_factory=list)

    def member_name(self, ranks: Sequence[int]) -> GroupName:
        """A name for the next group that exactly these ranks make, in this order; see distributed_c10d."""
        made = (making_for_mesh.get(), tuple(ranks))  # a split's ranks count inside its parent: another count
        self._named[made] += 1
        text = f"group {self._named[made]} of {'mesh' if made[0] else 'split'} ranks {made[1]}"
        return distributed_c10d.GroupName(hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def key(self, ranks: Sequence[int], override: Override) -> Key:
        """What must be equal for two requests to share."""
        backend, options = override
        default = distributed_c10d._get_default_group()
        return tuple(ranks), (backend or distributed_c10d.get_backend(default)).lower(), self._options_key(options)

    def find(self, key: Key) -> tuple[bool, ProcessGroup | None]:
        """(whether the group was made, the group if this rank is in it); a destroyed group counts as not made."""
        if key not in self.groups:
            return False, None
        group = self.groups[key]
        if group is not None and not is_alive(group):
            del self.groups[key]
            return False, None
        return True, group

    def remember(self, rank_map: RankMap, axis: Layout) -> None:
        """Note that the groups along this axis are there."""
        known = self.axes.setdefault(rank_map, [])
        if axis not in known:
            known.append(axis)
            _count_epoch()

    def layouts(self, rank_map: RankMap) -> list[Layout]:
        """The axes over a rank map that have groups, the whole world among them."""
        known = self.axes.get(rank_map, [])
        world = distributed_c10d._get_default_group()
        whole = [Layout((world.size(),))] if rank_map.numel == world.size() and not needs_device_group(world) else []
        return known + whole

    def group_of(self, view: View, axis: Layout, rank: int) -> ProcessGroup | None:
        """This rank's group over the indices of an axis, whatever its order; None if it isn't there."""
        world = distributed_c10d._get_default_group()
        if axis.numel == world.size() == view.rank_map.numel and not needs_device_group(world):
            return world
        for known in list(self.axes.get(view.rank_map, [])):
            if known.ascending() == axis.ascending():
                ranks = view.show(MeshLayout((known,))).ranks(rank)
                group = self.find(self.key(ranks, (None, None)))[1]
                if group is not None:
                    return group
                self.axes[view.rank_map].remove(known)  # destroyed, on all ranks alike as torch asks
                _count_epoch()
        return None

    def _options_key(self, options: Any) -> Any:
        """Options by value: their fields as they are before a backend writes into them."""
        if options is None:
            return None
        fields = [name for name in dir(options) if not name.startswith("__") and name not in _WRITTEN_BY_CREATORS]
        values = {name: getattr(options, name, None) for name in fields if not name.startswith("_pybind")}
        plain = {name: _plain(value) for name, value in values.items() if not callable(value)}
        if any(value is _OPAQUE for value in plain.values()):
            self._options.append(options)  # keeps the id from being used again
            return (type(options).__name__, id(options))
        return (type(options).__name__, tuple(sorted(plain.items())))


_OPAQUE: Any = object()


def _plain(value: Any) -> Any:
    """A value that says all of `value`, or _OPAQUE if there is no telling."""
    if value is None or isinstance(value, (bool, int, float, str, timedelta)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return _OPAQUE if any(part is _OPAQUE for part in parts) else tuple(parts)
    if type(value).__name__ == "Device":  # gloo's, of which each host has one by default
        return str(value)
    if type(value).__name__ == "NCCLConfig":
        parts = [(name, _plain(getattr(value, name))) for name in dir(value) if not name.startswith("_")]
        return _OPAQUE if any(part is _OPAQUE for _, part in parts) else tuple(parts)
    return _OPAQUE


_tables: weakref.WeakKeyDictionary[ProcessGroup, GroupTable] = weakref.WeakKeyDictionary()
_epoch = 0


def groups_epoch() -> int:
    """A number that changes with the world, and whenever groups come within reach, for whoever remembers which
    there are."""
    world = distributed_c10d.GroupMember.WORLD
    if world is not None:
        _table_of(world)  # a new world counts from its first question on
    return _epoch


def _count_epoch() -> None:
    global _epoch
    _epoch += 1


def group_table() -> GroupTable:
    """The table of the world that this thread is in now. Raises ValueError if there is none, as torch does."""
    return _table_of(distributed_c10d._get_default_group())


def _table_of(world: ProcessGroup) -> GroupTable:
    table = _tables.get(world)
    if table is not None:
        return table
    with _lock:
        if world not in _tables:
            _tables[world] = GroupTable()
            _count_epoch()
        return _tables[world]


def is_alive(group: ProcessGroup) -> bool:
    """Whether the world still knows the group by its name; names are used again after a destroy."""
    return distributed_c10d._world.pg_names.get(group) == group.group_name


def needs_device_group(world: ProcessGroup) -> bool:
    """A gloo world on a machine with GPUs can't serve device tensors, so torch makes another group."""
    return torch.cuda.is_available() and distributed_c10d.get_backend(world) == "gloo"
