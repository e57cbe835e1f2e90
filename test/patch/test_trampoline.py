"""What a trampoline takes and hands on, for every form of a signature."""

import inspect
import sys
import traceback
import types

import pytest

from torch_overlay.patching.trampoline import trampoline


def plain(a, b=2):
    return "plain", a, b


def only_positional(a, b, /, c):
    return a, b, c


def only_named(a, *, b, c=3):
    return a, b, c


def any_number(a, *rest, b=1, **more):
    return a, rest, b, more


def takes_body(body, body_, *args):
    return body, body_, args


def nothing():
    return "nothing"


CALLS = [
    (plain, (1,), {}),
    (plain, (), {"b": 1, "a": 5}),
    (only_positional, (1, 2), {"c": 3}),
    (only_named, (1,), {"b": 2}),
    (any_number, (1, 2, 3), {"b": 4, "c": 5}),
    (any_number, (), {"a": 1, "rest": 2}),
    (takes_body, (1, 2, 3), {}),
    (nothing, (), {}),
]


def swapped(body, **how):
    """A function with other globals that runs the body by a trampoline, as the engine makes it."""
    code = trampoline(body, f"{__name__}:{body.__name__}", **how)
    function = types.FunctionType(code, {"__builtins__": __builtins__}, body.__name__, body.__defaults__)
    function.__kwdefaults__ = body.__kwdefaults__
    return function


@pytest.mark.parametrize(("body", "args", "kwargs"), CALLS)
def test_it_answers_as_the_body_does(body, args, kwargs):
    assert swapped(body)(*args, **kwargs) == body(*args, **kwargs)


@pytest.mark.parametrize("body", dict.fromkeys(body for body, *_ in CALLS), ids=lambda body: body.__name__)
def test_it_refuses_what_the_body_refuses(body):
    assert inspect.signature(swapped(body)) == inspect.signature(body)
    for function in (body, swapped(body)):
        with pytest.raises(TypeError, match=rf"{body.__name__}\(\) (takes|missing|got)"):
            function(1, 2, 3, 4, nobody=1) if body is not any_number else function()


def test_the_body_is_looked_up_at_each_call(monkeypatch):
    function = swapped(plain)
    assert function(1) == ("plain", 1, 2)
    monkeypatch.setattr(sys.modules[__name__], "plain", lambda a, b: "another")
    assert function(1) == "another"


def test_tools_that_go_by_files_see_the_bodys():
    function = swapped(only_named)
    assert inspect.getsource(function) == inspect.getsource(only_named)
    try:
        swapped(plain)(*[1], b=[].index)[3]
    except IndexError as error:
        assert traceback.extract_tb(error.__traceback__)[-1].filename == __file__


def test_it_is_the_same_code_each_time():
    """Compilers keep what they made by the identity of the code, so enable() must not make it anew."""
    assert trampoline(plain, f"{__name__}:plain") is trampoline(plain, f"{__name__}:plain")
