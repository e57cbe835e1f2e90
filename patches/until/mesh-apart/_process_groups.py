"""Before single views can be private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup

    from ._universe import Universe

_shares_nothing = ...


def _default_serves(world: ProcessGroup, universe: Universe, request: Request) -> bool:
    """Whether the axis gets the default group, as an axis does that is the whole world.

    Beside a gloo default group, a mesh of other devices than CPUs has a group of its own, as it had before. What the
    mesh is for decides, and not what this host has, which may differ from host to host.
    """
    if universe.private or not _covers_world(request, world.size()):
        return False
    return request.device_type == "cpu" or distributed_c10d.get_backend(world) != "gloo"
