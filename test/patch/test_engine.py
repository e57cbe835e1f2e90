"""What a row may say, and how the engine treats each kind; the library needs no fingerprints here."""

import inspect
import warnings

import pytest

import fake_tree
from fake_tree import BUILD, MAKE, SIZE
from torch_overlay import versions
from torch_overlay.errors import ForeignPatch, PatchError
from torch_overlay.patching import engine
from torch_overlay.patching.patch import Patch


def known(patch, live):
    return None


def prepare(*patches):
    changes, refused = engine.prepare(patches, known)
    assert not refused, refused
    return list(changes.values())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Patch("fakelib.core:Mesh.size", "fakebody:Body.build"), "not the same kind"),
        (Patch("fakelib.core:Mesh.build", "fakebody:Body.size"), "not the same kind"),
        (Patch("fakelib.core:Mesh.shape", "fakebody:Body.size"), "not the same kind"),
        (Patch("fakelib.core:Mesh.size", "fakebody:Body.nothing"), "its body fakebody:Body.nothing isn't there"),
        (Patch("fakelib.core:cached", "fakebody:make"), "only the code of a plain function"),
        (Patch("fakelib.core:enclosed", "fakebody:make"), "only the code of a plain function"),
        (Patch("fakelib.core:make", "fakebody:Body"), "only the code of a plain function"),
        (Patch("fakelib.core:make", "fakebody:Body.size"), "a trampoline calls a function of a module"),
        (Patch("fakelib.core:wait", "fakebody:make"), "a trampoline calls a function of a module"),
    ],
)
def test_a_body_that_cannot_be_set_is_refused_before_anything_is(tree, row, words):
    tree.get("fakelib")
    before = tree.snapshot()
    with pytest.raises(PatchError, match=words):
        engine.prepare([BUILD if row.target == SIZE.target else SIZE, row], known)
    assert fake_tree.same(before, tree.snapshot())


@pytest.mark.parametrize(
    ("releases", "inside", "outside"),
    [
        ("", ["2.11.0", "3.0"], []),
        (">=2.13", ["2.13.0", "2.15.0"], ["2.12.1"]),
        ("<2.13.1", ["2.13.0", "2.11.0"], ["2.13.1", "2.14.0"]),
        (">=2.11,<2.15", ["2.11.0", "2.14.1"], ["2.10.0", "2.15.0"]),
    ],
)
def test_a_row_is_for_the_releases_within_its_bounds(releases, inside, outside):
    row = Patch("fakelib.core:make", "a:b", releases=releases)
    assert all(versions.parse(text).in_range(row) for text in inside)
    assert not any(versions.parse(text).in_range(row) for text in outside)


def test_swapped_code_reaches_every_copy_and_keeps_identity(tree):
    core, user = tree.get("fakelib.core"), tree.get("fakelib.user")
    function, code, defaults = core.make, core.make.__code__, core.make.__defaults__
    changes = prepare(MAKE)
    engine.apply(changes)
    assert core.make is user.make is function and function() == user.use() == ("ours", 1)
    assert function(extra=3) == function(1) and inspect.signature(function) == inspect.signature(
        tree.get("fakebody").make
    )
    engine.undo(changes)
    assert function.__code__ is code and function.__defaults__ is defaults and not function.__kwdefaults__
    assert function() == ("stock", 1)


def test_a_swapped_generator_stays_one(tree):
    core = tree.get("fakelib.core")
    changes = prepare(Patch("fakelib.core:count", "fakebody:count"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python warns of code of another kind
        engine.apply(changes)
        assert inspect.isgeneratorfunction(core.count) and list(core.count()) == ["ours", 2]
        engine.undo(changes)
    assert list(core.count(5)) == ["stock"]


def test_code_swapped_by_somebody_else_is_noticed(tree):
    core = tree.get("fakelib.core")
    changes = prepare(MAKE)
    engine.apply(changes)
    core.make.__code__ = (lambda n: "theirs").__code__
    with pytest.raises(ForeignPatch, match="core:make now runs the code of <lambda>"):
        engine.check_ours(changes)
    engine.undo(changes)
    assert core.make() == ("stock", 1)


def test_what_was_set_last_goes_back_first():
    order = []
    engine.apply(changes := [engine.Hook(name, lambda n=name: n, order.append) for name in "abc"])
    engine.undo(changes)
    assert order == ["c", "b", "a"]
