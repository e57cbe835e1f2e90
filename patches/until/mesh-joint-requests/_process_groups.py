"""Before groups over several axes are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from ._group_kind import Kind
from ._group_table import Entry, Key
from ._member_names import compact
from ._settings import get_settings
from ._universe import Universe, making_private

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import ProcessGroup

    from ._mesh_input import Override
    from ._view import View


@dataclass(frozen=True)
class Request:
    """A view of one axis that wants its group.

    Attributes:
        view: of the one axis.
        name: what the axis is called.
        override: the backend and options that the user gave for it.
        device_type: the mesh's.
    """

    view: View
    name: str
    override: Override
    device_type: str


def _default_serves(world: ProcessGroup, universe: Universe, request: Request) -> bool:
    """Whether the axis gets the default group, as an axis does that is the whole world.

    Beside a gloo default group, a mesh of other devices than CPUs has a group of its own, as it had before. What the
    mesh is for decides, and not what this host has, which may differ from host to host.
    """
    if universe.private or making_private.get() or not _covers_world(request, world.size()):
        return False
    return request.device_type == "cpu" or distributed_c10d.get_backend(world) != "gloo"


def _keys(request: Request, copies: Sequence[Sequence[int]]) -> list[Key]:
    """The keys of all copies, in the lane that the options give to the axis."""
    # A group of one rank is no communicator. With one for each name, a loop that destroys the groups of all axes works.
    named = get_settings().share_groups == "names" or request.view.layout.numel() == 1
    lane = request.name if named else None
    return [Key(compact(ranks), Kind.of(request.override), lane) for ranks in copies]


def _shares_nothing(universe: Universe, request: Request) -> bool:
    """Whether an axis gets a group that no other axis ever gets, be it in the same universe."""
    return making_private.get() and not universe.private


def _named(entry: Entry, request: Request) -> ProcessGroup | None:
    group = entry.group
    if group is not None and request.name not in entry.names:
        entry.names.append(request.name)
        if len(entry.names) > 1:
            group._set_group_desc("mesh_" + ",".join(entry.names))
    return group
