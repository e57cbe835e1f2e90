"""Fingerprints: what changes them, what doesn't; live objects against their file."""

import ast
import functools

import pytest

from torch_overlay.patching import recognise


def fingerprint(text, name):
    source = recognise.Source("m", "m.py")
    source.__dict__["tree"] = ast.parse(text)
    return source.fingerprint(name)


F = "def f(a, *, b=1): return a + b"


@pytest.mark.parametrize(
    "same",
    [
        "def f(a,*,b = 1):\n    # why\n    return (a + b)",
        'def f(a, *, b=1):\n    """Says what."""\n    return a + b',
        "x = 1\n\n\ndef f(a, *, b=1):\n        return a + b\n",
        "if True:\n    def f(a, *, b=1): return a + b",
    ],
)
def test_layout_comments_and_docstrings_are_no_part(same):
    assert fingerprint(same, "f") == fingerprint(F, "f")


@pytest.mark.parametrize(
    "other",
    [
        "def f(a, *, b=2): return a + b",
        "def f(a, *, b=1.0): return a + b",
        "def f(a, b=1): return a + b",
        "def f(a, *, b: int = 1): return a + b",
        "@g\ndef f(a, *, b=1): return a + b",
        "async def f(a, *, b=1): return a + b",
        "def f(a, *, b=1): return b + a",
        "def f(a, *, b=1):\n    'not the docstring' ''\n    'a statement'\n    return a + b",
        F + "\nif x:\n    " + F,
    ],
)
def test_what_runs_is(other):
    assert fingerprint(other, "f") not in (None, fingerprint(F, "f"))


def test_names_in_classes_branches_and_assignments_are_found():
    text = "try:\n  import a\nexcept E:\n  class C:\n    x = 1\n    def f(self): pass\nelse:\n  y: int = 3"
    assert all(fingerprint(text, name) for name in ("C", "C.x", "C.f", "y"))
    assert fingerprint(text, "f") is None and fingerprint(text, "C.f.x") is None


def test_a_property_is_all_of_its_definitions():
    text = "class C:\n  @property\n  def p(self): return 1\n  @p.setter\n  def p(self, v): {}"
    assert fingerprint(text.format("pass"), "C.p") != fingerprint(text.format("return 2"), "C.p")


def test_live_objects_are_compared_by_code(tree):
    core = tree.get("fakelib.core")
    source = recognise.source_of("fakelib.core")

    def stranger(name, value):
        return recognise.stranger(source, name, value)

    own = vars(core.Mesh)
    assert [stranger(f"Mesh.{n}", own[n]) for n in ("size", "build", "shape", "limit")] == [None] * 4
    assert stranger("make", core.make) is None and stranger("cached", core.cached) is None
    core.make()  # code that has run is still the same code
    assert stranger("make", core.make) is None
    assert "Mesh.other" in stranger("Mesh.size", own["other"])
    assert "make" in stranger("cached", core.make)
    assert "Mesh.other" in stranger("Mesh.shape", own["shape"].setter(own["other"]))

    @functools.wraps(core.make)
    def wrapper(*args):
        return core.make(*args)

    assert "test_recognise.py" in stranger("make", wrapper)
    core.make.__code__ = wrapper.__code__.replace(co_freevars=())
    assert "test_recognise.py" in stranger("make", core.make)
