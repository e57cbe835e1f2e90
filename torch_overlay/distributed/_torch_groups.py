"""What making and using groups needs beside a released torch. Upstream each function gives back its first argument, so
its calls go."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import get_backend

from ._groups.table import find_group

if TYPE_CHECKING:
    from collections.abc import Callable


# On while a group is made for a mesh: `new_group` takes no name, and asks for one in the middle, as `split_group` does.
making_for_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("making_for_mesh", default=False)


def for_mesh(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same constructor, whose ranks are those of a mesh, and not those of a split inside its parent. Upstream a
    split says which group it splits."""

    def making(**how: Any) -> Any:
        token = making_for_mesh.set(True)
        try:
            return make(**how)
        finally:
            making_for_mesh.reset(token)

    return making


def never_nothing(
    pack: Callable[..., torch.Tensor], outgoing: list[int], incoming: list[int], group: Any, own: int
) -> Callable[..., torch.Tensor]:
    """Changes `outgoing` and `incoming` for the fake process group, so call it before they are used: before 2.15 that
    group refuses to send nothing while something comes, so one element goes to oneself, where nobody reads it. No other
    group gets it: it is a constant, and in compiled code the exchange might depend on no input, and be run in the
    forward and in the backward graph."""
    made = find_group(group.name)
    if any(outgoing) or not any(incoming) or made is None or get_backend(made) != "fake":
        return pack
    outgoing[own] = incoming[own] = 1
    return lambda *made_from: torch.cat([pack(*made_from), made_from[0].new_zeros(1)])
