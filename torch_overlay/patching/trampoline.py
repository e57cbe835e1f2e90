"""Code that may stand in a function of another module: it finds a body of ours and calls it.

Swapped code runs with the globals of the function that it is put into, so no body can stand there itself.
"""

import functools
import inspect
import types

from .errors import PatchError

# What a code object says it is: how such a function hands on what the body answers.
_ANSWERS = {0: "return {}", inspect.CO_GENERATOR: "return (yield from {})"}
_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


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
    takes, gives = _signature(body.__code__)
    found = "body"
    while found in body.__code__.co_varnames:
        found += "_"
    call = answer.format(f"{found}({gives})")
    text = f"def {name}({takes}): from {module} import {name} as {found}; {call}"
    (code,) = (c for c in compile(text, body.__code__.co_filename, "exec").co_consts if isinstance(c, types.CodeType))
    return code.replace(co_firstlineno=body.__code__.co_firstlineno)


def _signature(code: types.CodeType) -> tuple[str, str]:
    """The parameters as a ``def`` has them, without defaults, and as a call passes them on."""
    count, named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames
    takes, gives = [*names[:count]], [*names[:count]]
    if code.co_posonlyargcount:
        takes.insert(code.co_posonlyargcount, "/")
    rest = iter(names[named:])
    if code.co_flags & inspect.CO_VARARGS:
        takes.append(star := f"*{next(rest)}")
        gives.append(star)
    elif code.co_kwonlyargcount:
        takes.append("*")
    takes += names[count:named]
    gives += [f"{name}={name}" for name in names[count:named]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        takes.append(stars := f"**{next(rest)}")
        gives.append(stars)
    return ", ".join(takes), ", ".join(gives)
