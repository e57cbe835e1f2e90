"""Code that replaces the code of a function in another module: it looks up a body of ours and calls it.

A body can't be set there itself. Swapped code runs with the globals of the function that it is put into, and a body
needs those of its own module.
"""

import functools
import inspect
import types
from typing import Any

from .patch import PatchError

# How a function and a generator return what the body returns, and how each kind of parameter is passed on to the body.
_RETURNS = {0: "return {}", inspect.CO_GENERATOR: "return (yield from {})"}
_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_PASSED_ON = ("{0}", "{0}", "*{0}", "{0}={0}", "**{0}")


@functools.lru_cache(maxsize=128)  # the same for every enable(), since compilers remember code by its identity
def trampoline(body: types.FunctionType, path: str, kind: int = 0) -> types.CodeType:
    """Return code with the parameters of the body that looks up the body at each call. Cached. It has the body's file
    and line, so dynamo, which decides by file, treats it as the body. Defaults belong to functions, not to code."""
    module, _, name = path.partition(":")
    returns = _RETURNS.get(kind & _KINDS)
    if returns is None or not name.isidentifier():
        raise PatchError(f"{path}: a trampoline calls a function of a module, and is one or a generator")
    parameters = inspect.signature(body, follow_wrapped=False).parameters
    signature = inspect.Signature([inspect.Parameter(p.name, p.kind) for p in parameters.values()])
    alias = "body"
    while alias in parameters:  # a parameter of that name would hide the body
        alias += "_"
    arguments = ", ".join(_PASSED_ON[p.kind].format(p.name) for p in parameters.values())
    call = returns.format(f"{alias}({arguments})")
    # The import stands inside, since this code runs with the globals of the function that it is put into.
    text = f"def {name}{signature}: from {module} import {name} as {alias}; {call}"
    (code,) = (c for c in compile(text, body.__code__.co_filename, "exec").co_consts if isinstance(c, types.CodeType))
    return code.replace(co_firstlineno=body.__code__.co_firstlineno)


def swap_code(function: Any, body: Any) -> types.CodeType:
    """Let a function run a body, with its own defaults. Returns its former code; set it as `__code__` to undo this."""
    former: types.CodeType = function.__code__
    function.__code__ = trampoline(body, f"{body.__module__}:{body.__name__}")
    return former
