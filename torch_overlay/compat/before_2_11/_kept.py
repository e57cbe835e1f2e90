"""Torch's own code under another name where torch is so old that it lacks a function, or an argument of one."""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def keep(module: types.ModuleType, name: str) -> Any:
    """A function that runs the code which the module's function of this name has now, and is called as later releases
    may call it: what torch's own doesn't know is left out. None where there is no such function."""
    function = getattr(module, name, None)
    if function is None:
        return None
    kept = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    kept.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    known = frozenset(inspect.signature(function).parameters)

    def call(*given: Any, **named: Any) -> Any:
        return kept(*given, **{name: value for name, value in named.items() if name in known})

    return call


def switch(module: types.ModuleType, name: str) -> bool:
    """Whether this switch is on; one that torch doesn't have yet is off."""
    return bool(getattr(module, name, False))


def uses_torchcomms() -> bool:
    return False


def compiles_for_all(mesh: DeviceMesh) -> bool:
    return False
