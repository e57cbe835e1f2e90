"""enable(), disable() and all that a user sees of them, on the fake library."""

import dataclasses
import re
import sys
import threading

import pytest

import fake_tree
import torch_overlay
from fake_tree import ALL, BUILD, MAKE, NOTE, SHAPE, SIZE, WORK
from torch_overlay import choices, errors, overlay
from torch_overlay.distributed import config
from torch_overlay.patching import patch


def states(status):
    return {row.target.rpartition(":")[2]: row.state for row in status.rows}


def test_every_kind_takes_effect_and_goes_back(tree):
    tree.rows(*ALL)
    core, user = tree.get("fakelib.core"), tree.get("fakelib.user")
    before = tree.snapshot()
    torch_overlay.enable()
    mesh = core.Mesh()
    assert (mesh.size(), mesh.build(1), mesh.shape, mesh.note) == ("our size", "our build", "our shape", None)
    assert core.Mesh.build(1) == "our build"  # still a static method
    assert core.make() == user.use() == ("ours", 1)
    torch_overlay.disable()
    assert fake_tree.same(before, tree.snapshot())
    assert tree.get("fakebody").calls == ["on", 7]


def test_a_late_module_is_patched_when_its_package_is_there(tree):
    tree.rows(*ALL)
    finders = list(sys.meta_path)
    assert states(torch_overlay.enable())["work"] == "waiting" and "fakelib.late" not in sys.modules
    late = tree.get("fakelib.late")
    assert late.work() == late.inner.work() == late.friend.work() == "our work"
    assert states(torch_overlay.status())["work"] == "on"
    loaders = {type(tree.get(name).__loader__).__name__ for name in ("fakelib.late", "fakelib.late.inner")}
    assert loaders == {"SourceFileLoader"}
    torch_overlay.disable()
    assert late.work() == late.inner.work() == ("stock", ("stock", 1)) and late.friend.work is late.inner.work
    assert sys.meta_path == finders


def test_a_module_that_another_thread_imports_while_rows_are_applied_is_patched(tree, monkeypatch):
    """Its rows weren't among those that were applied, nor did any wait for it."""
    tree.rows(*ALL)
    apply = overlay.Session.apply

    def apply_and_import(session, patches):
        thread = threading.Thread(target=tree.get, args=("fakelib.late",))
        thread.start()
        thread.join()
        apply(session, patches)

    monkeypatch.setattr(overlay.Session, "apply", apply_and_import)
    assert set(states(torch_overlay.enable()).values()) == {"on"}
    assert tree.get("fakelib.late").work() == "our work"


def test_a_changed_late_module_refuses_from_its_file(tree):
    tree.rows(*ALL)
    tree.edit("fakelib.late.inner", "'stock'", "'other'")
    with pytest.raises(errors.ChangedTarget, match=r"fakelib\.late\.inner:work: .*another body"):
        torch_overlay.enable()
    assert "fakelib.late" not in sys.modules and tree.get("fakelib.core").make() == ("stock", 1)


@pytest.mark.parametrize("row", [MAKE, SIZE, BUILD, SHAPE], ids=lambda row: row.name)
def test_a_changed_body_changes_nothing_and_is_named(tree, row):
    tree.rows(*ALL)
    for word in ("size", "build", "shape") if row.owner else ():
        tree.edit("fakelib.core", f"stock {word}", f"nightly {word}") if word == row.name else None
    if not row.owner:
        tree.edit("fakelib.core", '("stock", n)', '("nightly", n)')
    tree.get("fakelib")
    before = tree.snapshot()
    with pytest.raises(errors.ChangedTarget, match=f"{row.qualname}: .*another body.*\n.*strict=False"):
        torch_overlay.enable()
    assert fake_tree.same(before, tree.snapshot()) and not torch_overlay.is_enabled()
    left = states(torch_overlay.enable(strict=False))
    assert {name for name, state in left.items() if state == "left out"} == {row.qualname}


def test_somebodys_own_patch_is_noticed_and_named(tree):
    tree.rows(*ALL)
    core = tree.get("fakelib.core")
    core.Mesh.size = theirs = lambda self: "theirs"
    with pytest.raises(errors.ChangedTarget, match=r"Mesh\.size: somebody replaced it by .*lambda.*test_overlay\.py"):
        torch_overlay.enable()
    assert core.Mesh.size is theirs and core.make() == ("stock", 1)
    del core.Mesh.size
    with pytest.raises(errors.ChangedTarget, match=r"Mesh\.size isn't there"):
        torch_overlay.enable()


def test_an_added_name_must_be_free(tree):
    tree.rows(*ALL)
    tree.get("fakelib.core").Mesh.note = 5
    with pytest.raises(errors.ChangedTarget, match=r"Mesh\.note is there already, as the int 5"):
        torch_overlay.enable()


@pytest.mark.parametrize("release", ["2.9.1", "2.10.0+cu128", "2.16.0", "2.13.7rc1", "2.13.0a0+git12"])
def test_an_unknown_release_is_refused_unless_its_bodies_are_known(tree, release):
    """Those that were given up, the next, and pre-releases. The error names the releases to install instead."""
    tree.rows(*ALL)
    tree.running(release)
    known = r"\(2\.11\.0, 2\.12\.1, 2\.13\.0, 2\.14\.1, 2\.15\.0\)"
    with pytest.raises(errors.UnknownRelease, match=rf"torch {re.escape(release)} isn't one of .*{known}"):
        torch_overlay.enable()
    assert tree.get("fakelib.core").make() == ("stock", 1)
    assert states(torch_overlay.enable(strict=False))["make"] == "on"


@pytest.mark.parametrize("release", ["2.13.7", "2.13.7+cu130", "2.13.1.post2"])
def test_a_patch_release_is_recognised_by_its_code(tree, release):
    tree.rows(*ALL)
    tree.running(release)
    with torch_overlay.enabled() as status:
        assert str(status).startswith(f"torch_overlay is on (torch {release}, recognised by the code of 2.13.0): ")
        assert states(status)["make"] == "on"
    tree.edit("fakelib.late.inner", "'stock'", "'other'")
    with pytest.raises(errors.ChangedTarget, match=r"1 of .* targets.*\n.*inner:work.*another body"):
        torch_overlay.enable()


def test_rows_of_one_unit_stand_or_fall_together(tree):
    rows = [dataclasses.replace(row, unit="mesh") for row in (SIZE, BUILD, WORK)]
    tree.rows(*rows, MAKE)
    tree.edit("fakelib.late.inner", "'stock'", "'other'")
    status = torch_overlay.enable(strict=False)
    assert states(status) == {"Mesh.size": "left out", "Mesh.build": "left out", "work": "left out", "make": "on"}
    assert "it makes sense only with fakelib.late.inner:work" in status.all()
    assert tree.get("fakelib.core").Mesh().size() == "stock size"


@pytest.mark.parametrize("releases", [">=2.14", "<2.13", ">=2.12,<2.13.0"])
def test_outside_its_releases_a_row_leaves_the_original(tree, releases):
    row = patch.Patch(SIZE.target, SIZE.body, releases=releases, ends="pytorch/pytorch#1")
    tree.rows(row)
    original = vars(tree.get("fakelib.core").Mesh)["size"]
    status = torch_overlay.enable()
    assert vars(tree.get("fakelib.core").Mesh)["size"] is original
    assert status.rows[0].state == "stands down"
    assert status.rows[0].why == f"for torch {releases} (ended by pytorch/pytorch#1)"


def test_a_failing_hook_takes_the_others_back(tree):
    broken = patch.Patch("fakelib.core:make", "fakebody:broken", patch.Kind.HOOK, undo="fakebody:unhook")
    tree.rows(SIZE, fake_tree.HOOK, NOTE, broken)
    tree.get("fakelib")
    before = tree.snapshot()
    with pytest.raises(errors.OverlayError, match=r"fakelib\.core:make couldn't be patched .*a hook that fails"):
        torch_overlay.enable()
    assert fake_tree.same(before, tree.snapshot()) and not torch_overlay.is_enabled()
    assert tree.get("fakebody").calls == ["on", 7]


def test_disable_refuses_to_tear_a_later_patch_apart(tree):
    tree.rows(*ALL)
    core = tree.get("fakelib.core")
    torch_overlay.enable()
    ours = core.Mesh.size
    core.Mesh.size = lambda self: "theirs around " + ours(self)
    with pytest.raises(errors.ForeignPatch, match=r"fakelib\.core:Mesh\.size is now .*test_overlay.*force=True"):
        torch_overlay.disable()
    assert torch_overlay.is_enabled() and core.make() == ("ours", 1)
    core.Mesh.size = ours
    torch_overlay.disable()
    assert core.Mesh().size() == "stock size"


def test_force_puts_torchs_own_object_back(tree):
    tree.rows(*ALL)
    core = tree.get("fakelib.core")
    before = tree.snapshot()
    torch_overlay.enable()
    core.Mesh.size = core.make = None
    del core.Mesh.note
    torch_overlay.disable(force=True)
    assert fake_tree.same(before, tree.snapshot()) and not torch_overlay.is_enabled()


def test_names_bound_while_on_are_given_back(tree):
    tree.rows(MAKE)
    torch_overlay.enable()
    stray = type(sys)("fakelib_stray")
    stray.make = tree.get("fakelib.core").make
    tree.monkeypatch.setitem(sys.modules, "fakelib_stray", stray)
    torch_overlay.disable()
    assert stray.make is tree.get("fakelib.core").make
    assert tree.get("fakebody").make() == ("ours", 1)  # the body itself stays where it lives


def test_enabling_twice_is_enabling_once(tree):
    tree.rows(*ALL)
    before = (tree.get("fakelib"), tree.snapshot())[1]
    torch_overlay.enable()
    torch_overlay.enable()
    torch_overlay.disable()
    assert fake_tree.same(before, tree.snapshot())
    torch_overlay.disable()  # and twice off is off


def test_a_second_enable_changes_only_what_it_names(tree, monkeypatch):
    tree.rows()
    monkeypatch.setenv("TORCH_OVERLAY_CREATE", "world")
    torch_overlay.enable(flatten="existing")
    torch_overlay.enable(check_mesh=True)
    now = torch_overlay.options()
    assert (now.create, now.flatten, now.check_mesh, now.share_groups) == ("world", "existing", True, "names")
    torch_overlay.disable()
    settings = {name: getattr(config, name) for name in choices.SETTINGS.values()}
    assert settings == choices.settings(dataclasses.asdict(choices.DEFAULT)), "as torch_overlay has them by default"
    assert (torch_overlay.options().flatten, torch_overlay.options().create) == ("whole", "world")
    torch_overlay.enable()
    assert torch_overlay.options().flatten == "whole"


def test_a_wrong_option_changes_nothing(tree):
    tree.rows(*ALL)
    with pytest.raises(errors.OptionError, match="did you mean 'flatten'"):
        torch_overlay.enable(flaten="whole")
    assert not torch_overlay.is_enabled() and "fakelib" not in sys.modules


def test_strict_after_a_lenient_enable_says_what_is_missing(tree):
    tree.rows(SIZE, MAKE)
    tree.edit("fakelib.core", "stock size", "nightly size")
    torch_overlay.enable(strict=False)
    torch_overlay.enable()  # asks for nothing in particular
    with pytest.raises(errors.ChangedTarget, match=r"without these rows: fakelib\.core:Mesh\.size"):
        torch_overlay.enable(strict=True)


def test_enabled_restores_what_was_around_it(tree):
    tree.rows(*ALL)
    with torch_overlay.enabled(flatten="existing") as status:
        assert status.enabled and torch_overlay.options().flatten == "existing"
        with torch_overlay.enabled(flatten="whole", create="world"):
            assert torch_overlay.options().flatten == "whole"
        assert torch_overlay.is_enabled()
        assert (torch_overlay.options().flatten, torch_overlay.options().create) == ("existing", "members")
    assert not torch_overlay.is_enabled()
    with pytest.raises(KeyError), torch_overlay.enabled():
        raise KeyError("the block's own error comes out")
    assert not torch_overlay.is_enabled()


def overlapping(*moves):
    """What `flatten` is (None if off) after each move: (0, {...}) begins block 0 in a thread of its own, 0 ends it."""
    left = [threading.Event() for _ in range(4)]
    seen, threads = [], {}

    def block(number, options, entered):
        with torch_overlay.enabled(**options):
            entered.set()
            assert left[number].wait(60)

    for move in moves:
        number, options = move if isinstance(move, tuple) else (move, None)
        if options is not None:
            entered = threading.Event()
            threads[number] = threading.Thread(target=block, args=(number, options, entered))
            threads[number].start()
            assert entered.wait(60)
        else:
            left[number].set()
            threads[number].join()
        seen.append(torch_overlay.options().flatten if torch_overlay.is_enabled() else None)
    return seen


def test_the_last_of_overlapping_blocks_turns_the_overlay_off(tree):
    """The overlay is the process's: a block of another thread that ends first takes it from nobody."""
    tree.rows(*ALL)
    existing, whole = {"flatten": "existing"}, {"flatten": "whole"}
    assert overlapping((0, existing), (1, whole), 0, 1) == ["existing", "whole", "whole", None]
    assert overlapping((0, existing), (1, whole), 1, 0) == ["existing", "whole", "existing", None]
    assert overlapping((0, existing), (1, whole), 0, (2, existing), 1, 2)[2:] == [
        "whole",
        "existing",
        "existing",
        None,
    ]
    torch_overlay.enable(flatten="whole")
    assert overlapping((0, existing), (1, {}), 0, 1) == ["existing", "existing", "existing", "whole"]


def test_a_block_that_begins_while_another_is_turning_the_overlay_on_keeps_it(tree, monkeypatch):
    """A block that isn't through its enable() yet counts, so that a faster one that leaves doesn't turn it off."""
    from torch_overlay import overlay

    tree.rows(*ALL)
    enable, blocks = overlay.enable, [torch_overlay.enabled(), torch_overlay.enabled()]

    def slow(*how, **options):
        monkeypatch.setattr(overlay, "enable", enable)
        thread = threading.Thread(target=blocks[1].__enter__)
        thread.start()
        thread.join()
        return enable(*how, **options)

    monkeypatch.setattr(overlay, "enable", slow)
    with blocks[0]:
        blocks[1].__exit__(None, None, None)
        assert torch_overlay.is_enabled()
    assert not torch_overlay.is_enabled()


def test_a_block_that_cannot_begin_leaves_all_as_it_was(tree):
    tree.rows(*ALL)
    with torch_overlay.enabled(flatten="existing"):
        with pytest.raises(errors.OptionError), torch_overlay.enabled(flatten="no"):
            raise AssertionError
        torch_overlay.enable(flatten="whole")
        with pytest.raises(errors.OptionError), torch_overlay.enabled(flatten="no"):
            raise AssertionError
        assert torch_overlay.options().flatten == "whole"
    assert not torch_overlay.is_enabled()


def test_the_blocks_own_error_comes_out_whatever_else_goes_wrong(tree):
    tree.rows(*ALL)
    core = tree.get("fakelib.core")
    with pytest.raises(KeyError, match="mine") as caught, torch_overlay.enabled():
        core.Mesh.size = lambda self: "theirs"
        raise KeyError("mine")
    notes = getattr(caught.value, "__notes__", ["after this error: The overlay can't be taken away, core:Mesh.size"])
    assert len(notes) == 1 and "after this error: The overlay can't be taken away" in notes[0], notes
    torch_overlay.disable(force=True)
    with pytest.raises(errors.ForeignPatch, match=r"Mesh\.size"), torch_overlay.enabled():  # nothing to hide
        core.Mesh.size = lambda self: "theirs"


def test_threads_that_enable_and_disable_leave_the_library_whole(tree):
    tree.rows(*ALL)
    tree.get("fakelib.late"), tree.get("fakebody")
    before, failures = tree.snapshot(), []

    def work():
        try:
            for _ in range(20):
                torch_overlay.enable()
                torch_overlay.status()
                torch_overlay.disable()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not torch_overlay.is_enabled()
    assert fake_tree.same(before, tree.snapshot())


def test_an_undo_that_fails_still_turns_the_overlay_off(tree):
    tree.rows(*ALL)
    finders = list(sys.meta_path)
    torch_overlay.enable(flatten="existing")
    tree.get("fakebody").calls = None  # so that the hook's undo raises
    with pytest.raises(errors.OverlayError, match="The overlay is off, but not everything went back"):
        torch_overlay.disable()
    assert not torch_overlay.is_enabled() and sys.meta_path == finders and torch_overlay.options().flatten == "whole"
    assert tree.get("fakelib.core").make() == ("stock", 1)


def test_rows_that_are_left_out_stay_as_they_are_until_disable(tree):
    """Each unit by itself; a row that isn't recognised doesn't matter then, and what is left out can't change."""
    tree.rows(dataclasses.replace(SIZE, unit="clip_grad_norm"), dataclasses.replace(BUILD, unit="cross_mesh"), SHAPE)
    status = torch_overlay.enable(leave_out=("clip_grad_norm",))
    assert list(states(status).values()) == ["off", "on", "on"]
    assert status.rows[0].why == "leave_out names clip_grad_norm"
    assert (
        tree.get("fakelib.core").Mesh().size() != "our size" and tree.get("fakelib.core").Mesh.build(1) == "our build"
    )
    assert "leave_out=clip_grad_norm" in str(status)
    torch_overlay.enable(leave_out="clip_grad_norm", flatten="existing")
    with pytest.raises(errors.OptionError, match=r"on with leave_out=.'clip_grad_norm',.. disable.. it to ask for .."):
        torch_overlay.enable(leave_out=())
    assert torch_overlay.options().flatten == "existing"
    torch_overlay.disable()
    assert list(states(torch_overlay.enable()).values()) == ["on"] * 3
