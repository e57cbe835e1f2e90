"""Torch's own code under another name, for bodies that put theirs in its place and still need it."""

from __future__ import annotations

import types


def original(module: types.ModuleType | type, name: str) -> types.FunctionType:
    """A function of its own with the code that the module's or class's function of this name has now; swapping the code
    of one leaves the other alone."""
    function = getattr(module, name)
    kept = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    kept.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return kept
