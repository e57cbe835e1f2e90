"""Torch's own code under another name where torch is so old that it lacks a function, or an argument of one."""

from __future__ import annotations

import inspect
import types
from typing import Any


def original(module: types.ModuleType | type, name: str) -> Any:
    """A function that runs the code which the module's or class's function of this name has now, and is called as later
    releases may call it: what torch's own doesn't know is left out. None where there is no such function."""
    function = getattr(module, name, None)
    if function is None:
        return None
    kept = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    kept.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    known = frozenset(inspect.signature(function).parameters)

    def call(*given: Any, **named: Any) -> Any:
        return kept(*given, **{name: value for name, value in named.items() if name in known})

    return call
