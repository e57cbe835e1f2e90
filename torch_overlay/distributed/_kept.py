"""Torch's own code under another name, for bodies that put theirs in its place and still need it; and its switches."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch
from torch.distributed import config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def keep(module: types.ModuleType, name: str) -> types.FunctionType:
    """A function of its own with the code that the module's function of this name has now; swapping the code of one
    leaves the other alone."""
    function = getattr(module, name)
    kept = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    kept.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return kept


def switch(module: types.ModuleType, name: str) -> bool:
    """Whether this switch of torch's is on."""
    return bool(getattr(module, name))


def uses_torchcomms() -> bool:
    return bool(config.use_torchcomms)


def compiles_for_all(mesh: DeviceMesh) -> bool:
    """Whether code is being compiled on one rank for all."""
    return mesh.ndim > 0 and isinstance(mesh._sym_get_coordinate(0), torch.SymInt)
