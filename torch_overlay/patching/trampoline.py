"""Code that may stand in a function of another module: it finds a body of ours and calls it.

Swapped code runs with the globals of the function that it is put into, so no body can stand there itself.
"""

import functools
import inspect
import types
from typing import Any

from .errors import PatchError

# How a function of each kind hands on what the body answers, and how a parameter of each kind is handed to the body.
_ANSWERS = {0: "return {}", inspect.CO_GENERATOR: "return (yield from {})"}
_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GIVEN = ("{0}", "{0}", "*{0}", "{0}={0}", "**{0}")


@functools.lru_cache(maxsize=128)  # the same for every enable(), since compilers remember code by its identity
def trampoline(body: types.FunctionType, path: str, kind: int = 0) -> types.CodeType:
    """The code of a function that takes what the body takes and calls it.

    It looks the body up at each call. It has the body's file and line, so that tools which go by files (dynamo) see the
    body's, and `inspect.getsource` finds its text. Defaults aren't part of code: they are the function's.

    Args:
        body: a plain function.
        path: where it is looked up, ``module:name``.
        kind: flags of the code that this one replaces; a generator is replaced by a generator.
    """
    module, _, name = path.partition(":")
    answer = _ANSWERS.get(kind & _KINDS)
    if answer is None or not name.isidentifier():
        raise PatchError(f"{path}: a trampoline calls a function of a module, and is one or a generator")
    names = inspect.signature(body, follow_wrapped=False).parameters
    takes = inspect.Signature([inspect.Parameter(p.name, p.kind) for p in names.values()])
    found = "body"
    while found in names:
        found += "_"
    call = answer.format(f"{found}({', '.join(_GIVEN[p.kind].format(p.name) for p in names.values())})")
    text = f"def {name}{takes}: from {module} import {name} as {found}; {call}"
    (code,) = (c for c in compile(text, body.__code__.co_filename, "exec").co_consts if isinstance(c, types.CodeType))
    return code.replace(co_firstlineno=body.__code__.co_firstlineno)


def swap_code(function: Any, body: Any) -> types.CodeType:
    """Let a function, under every name that it has, run a body, a function of its module's top level. Returns the code
    that was there, to be set again."""
    code: types.CodeType = function.__code__
    function.__code__ = trampoline(body, f"{body.__module__}:{body.__name__}")
    return code
