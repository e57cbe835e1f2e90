"""What a row may say, and how the engine treats each kind; the library needs no fingerprints here."""

import pytest

import fake_tree
from fake_tree import BUILD, MAKE, SIZE, SWAP
from torch_overlay.errors import ForeignPatch, PatchError
from torch_overlay.patching import engine
from torch_overlay.patching.patch import Kind, Patch


def known(patch, live):
    return None


def prepare(*patches):
    changes, refused = engine.prepare(patches, known)
    assert not refused, refused
    return [change for group in changes.values() for change in group]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (dict(target="fakelib.core", body="a:b"), "names no attribute"),
        (dict(target="fakelib.core:make", body="fakebody"), "the path 'fakebody'"),
        (dict(target="fakelib.core:make", body="a:b", copies=("c",)), "the path 'c'"),
        (dict(target="fakelib.core:make", body="a:b", undo="a:c"), "undo= exactly if"),
        (dict(target="fakelib.core:make", body="a:b", kind=Kind.HOOK), "undo= exactly if"),
        (dict(target="fakelib.core:Mesh.size", body="a:b", copies=("c:d",)), "declares copies"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_at_birth(row, words):
    with pytest.raises(PatchError, match=f"The row for .*{words}"):
        Patch(**row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Patch("fakelib.core:Mesh.size", "fakebody:Body.build"), "not the same kind"),
        (Patch("fakelib.core:Mesh.build", "fakebody:Body.size"), "not the same kind"),
        (Patch("fakelib.core:Mesh.shape", "fakebody:Body.size"), "not the same kind"),
        (Patch("fakelib.core:Mesh.size", "fakebody:Body.nothing"), "its body fakebody:Body.nothing isn't there"),
        (Patch("fakelib.core:cached", "fakebody:make_inside", Kind.CODE), "only a function's code"),
        (Patch("fakelib.core:make", "fakebody:make_outside", Kind.CODE), r"uses \['sys'\]"),
    ],
)
def test_a_body_that_cannot_be_set_is_refused_before_anything_is(tree, row, words):
    tree.get("fakelib")
    before = tree.snapshot()
    with pytest.raises(PatchError, match=words):
        engine.prepare([BUILD if row.target == SIZE.target else SIZE, row], known)
    assert fake_tree.same(before, tree.snapshot())


def test_two_rows_for_one_target_are_refused(tree):
    tree.get("fakelib")
    with pytest.raises(PatchError, match=r"Mesh\.size is patched by two rows"):
        engine.prepare([SIZE, SIZE], known)


def test_swapped_code_reaches_every_copy_and_keeps_identity(tree):
    core, user = tree.get("fakelib.core"), tree.get("fakelib.user")
    function, code = core.make, core.make.__code__
    third_party = core.make
    changes = prepare(SWAP)
    engine.apply(changes)
    assert core.make is user.make is function and third_party() == ("swapped", 2, len("functools"))
    engine.undo(changes)
    assert function.__code__ is code and third_party() == ("stock", 1)


def test_code_swapped_by_somebody_else_is_noticed(tree):
    core = tree.get("fakelib.core")
    changes = prepare(SWAP)
    engine.apply(changes)
    core.make.__code__ = (lambda n: "theirs").__code__
    with pytest.raises(ForeignPatch, match="core:make now runs the code of <lambda>"):
        engine.check_ours(changes)
    engine.undo(changes)
    assert core.make() == ("stock", 1)


def test_an_undo_that_fails_does_not_keep_the_others(tree):
    core, body = tree.get("fakelib.core"), tree.get("fakebody")
    changes = prepare(SIZE, fake_tree.HOOK, MAKE)
    engine.apply(changes)
    body.calls = None  # so that the hook's undo raises
    with pytest.raises(engine.OverlayError, match=r"not everything went back: fakelib\.core:make: AttributeError"):
        engine.undo(changes)
    assert core.Mesh().size() == "stock size" and core.make() == ("stock", 1)


def test_what_was_set_last_goes_back_first():
    order = []
    engine.apply(changes := [engine.Hook(name, lambda n=name: n, order.append) for name in "abc"])
    engine.undo(changes)
    assert order == ["c", "b", "a"]
