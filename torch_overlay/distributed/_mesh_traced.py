"""A mesh as code meets it under tracing."""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING, Any

import torch

from ._mesh_group_names import group_names
from ._mesh_state import shared_state
from ._universe import making_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._shared_state import SharedState


def real_mesh(mesh: Any) -> DeviceMesh:
    """The mesh itself: under tracing a wrapper may come, whose attributes aren't all the mesh's."""
    return getattr(mesh, "real_obj", mesh)


def is_traced() -> bool:
    """Whether dynamo reads this code. Dynamo can't make meshes; a view must be an attribute that it can guard."""
    return torch.compiler.is_dynamo_compiling()


def traced_view(mesh: DeviceMesh, method: str, *arguments: Any) -> DeviceMesh:
    """What a method of the mesh gives, as an input of the graph: made once, when the code is compiled."""
    name = mesh._trace_view(method, *map(_fixed, arguments))
    return getattr(mesh._get_root_mesh()._traced_views, name)


def whose_views(mesh: DeviceMesh) -> tuple[Any, ...]:
    """What compiled code is guarded by beside the mesh's value: it may have names of groups in it, of views that it
    made, too. Those of an equal mesh may be others, and are after abort()."""
    universe = shared_state(mesh).universe
    return group_names(mesh), universe.serial if universe is not None else None


def _fixed(argument: Any) -> Any:
    """The same, with numbers that the compiler would leave open: each other number makes another view."""
    if isinstance(argument, dict):
        return {name: _fixed(value) for name, value in argument.items()}
    if isinstance(argument, (list, tuple)):
        return tuple(map(_fixed, argument))
    return operator.index(argument) if isinstance(argument, int) else argument


def keep_view(mesh: DeviceMesh, method: str, arguments: tuple[Any, ...]) -> str:
    """Make a view for compiled code and keep it with the universe; returns the name by which `_traced_views` has it.

    It is made once, however often the code is compiled: another rank may compile once more, or less, and a view may
    need groups.
    """
    traced = shared_state(mesh).traced
    said = f"{method}{_said(arguments)} of {mesh._stable_hash()} on {group_names(mesh)}, {making_private.get()}"
    name = f"view_{hashlib.blake2b(said.encode(), digest_size=16).hexdigest()}"
    if not hasattr(traced, name):
        setattr(traced, name, getattr(mesh, method)(*arguments))
    return name


def forget_views(shared: SharedState) -> None:
    """Let compiled code make its views anew."""
    vars(shared.traced).clear()


def _said(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"({', '.join(map(_said, argument))})"
    return (
        f"{argument._stable_hash()} on {group_names(argument)}" if hasattr(argument, "_stable_hash") else repr(argument)
    )
