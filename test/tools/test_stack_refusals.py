"""What the stack refuses, and with which words: trees, insertions, files and folders that aren't as they should be."""

import dataclasses
import importlib.util
import pathlib
import shutil

import libcst as cst
import pytest

from stack_trees import ROOT, small_tree

# isort: split
import render_stack
from stack.insert import insert, read_insertions
from stack.message import StackError, read_message, read_series
from stack.render import Prefix
from stack.room import read_words
from stack.tree import Tree, write

from stack import check

MESSAGES = read_series()


@pytest.mark.parametrize(
    ("path", "old", "new", "words"),
    [
        ("device_mesh.py", "def _concatenate(", "def _joined(", "defines no DeviceMesh._concatenate"),
        ("device_mesh.py", "def _stable_hash(self) -> str:", "def _stable_hash(self, salt=0) -> str:", "_stable_hash"),
        (
            "tensor/_redistribute.py",
            "def redistribute_local_tensor(",
            "def redistribute_it(",
            "redistribute_local_tensor",
        ),
    ],
)
def test_a_changed_upstream_function_is_refused_by_name(tmp_path, path, old, new, words):
    file = small_tree(tmp_path) / "torch/distributed" / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.py")}
    with pytest.raises(StackError, match=words):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, len(MESSAGES))
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*.py")}


def test_a_tree_from_before_the_layouts_is_refused(tmp_path):
    (small_tree(tmp_path) / "torch/version.py").write_text("__version__ = '2.12.1'\n")
    with pytest.raises(StackError, match=r"is torch 2.12.1. The stack is for 2.13 and later"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, len(MESSAGES))


def test_a_name_that_torch_uses_for_something_else_is_refused(tmp_path):
    file = small_tree(tmp_path) / "torch/distributed/tensor/_redistribute.py"
    file.write_text(file.read_text() + "\n\ndef find_answer():\n    pass\n")
    with pytest.raises(StackError, match=r"_redistribute\.py calls something else find_answer"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, len(MESSAGES))


def test_forms_for_what_a_tree_lacks_stay_away_from_one_that_has_it(tmp_path):
    """Before 2.15 DeviceMesh takes no preserve_rank_order, and its function that makes groups can't be told."""
    small_tree(tmp_path)
    file = tmp_path / "torch/distributed/device_mesh.py"
    member_of_2_15 = "        _preserve_rank_order: bool\n"
    text = file.read_text().replace(member_of_2_15, "")
    head, members, tail = text.partition("        _device_type: str\n")
    assert members
    count = 1 + [message.name for message in MESSAGES].index("mesh-rank-order")
    for member in ("", member_of_2_15):
        file.write_text(head + members + member + tail)
        groups = render_stack.rendered(Tree.at(tmp_path), MESSAGES, count)["torch/distributed/_mesh_groups.py"]
        assert ("name, override, ordered" in groups) == bool(member)
        assert ("sort_ranks=False" in groups) == (not member)


def test_a_function_that_a_tree_lacks_has_forms_too(tmp_path):
    """Before 2.14 no graph stands for all ranks, so a group comes from nowhere but the mesh."""
    small_tree(tmp_path)
    file = tmp_path / "torch/distributed/device_mesh.py"
    head, stub, tail = file.read_text().partition("else:\n")
    function = "    def _maybe_traced_group(mesh, mesh_dim):\n        pass\n\n"
    tail = tail.replace("    def _maybe_traced_group(", "    def _lost(")
    names = [message.name for message in MESSAGES]
    for count in (names.index("mesh-get-group") + 1, names.index("mesh-pickling") + 1):
        for there in ("", function):
            file.write_text(head + stub + there + tail)
            files = render_stack.rendered(Tree.at(tmp_path), MESSAGES, count)
            text = files["torch/distributed/_mesh_groups.py"]
            assert ("_maybe_traced_group" in text) == bool(there)
            assert ("UNBOUND" in text) == (count > names.index("mesh-pickling"))


def test_removing_what_is_not_there_is_refused(tmp_path):
    """As is removing what somebody changed: it may have a new caller, or a fix."""
    file = small_tree(tmp_path) / "torch/distributed/device_mesh.py"
    text = file.read_text()
    file.write_text(text.replace("def _init_process_groups(", "def _init_other_groups("))
    count = 1 + [message.name for message in MESSAGES].index("mesh-reshape")
    with pytest.raises(StackError, match=r"device_mesh\.py defines no DeviceMesh\._init_process_groups, which a patch"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, count)
    file.write_text(text.replace("pg_name = None\n", "pg_name = ''\n", 1))
    with pytest.raises(StackError, match=r"DeviceMesh\._init_one_process_group: .* with another body than any release"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, len(MESSAGES))


def test_a_phrase_without_its_replacement_is_refused_by_line(tmp_path):
    (tmp_path / "patches/instead").mkdir(parents=True)
    (tmp_path / "patches/instead/words").write_text("an option => a switch\nan option\n")
    with pytest.raises(StackError, match=r"patches/instead/words:2: needs 'ours => theirs': 'an option'"):
        read_words(tmp_path / "patches", ())


MERGING = "insert/safe-merging/tensor/_redistribute.py"


@pytest.fixture
def patches(tmp_path):
    """A copy of `patches/` for planted breaches, of the first patch only."""
    copied = shutil.copytree(ROOT / "patches", tmp_path / "patches", ignore=shutil.ignore_patterns("until"))
    for others in [folder for folder in (copied / "insert").iterdir() if folder.name != "safe-merging"]:
        shutil.rmtree(others)
    return copied


def first_patch(tmp_path, patches) -> Prefix:
    return Prefix(Tree.at(small_tree(tmp_path / "tree")), read_series(patches)[:1], [], patches=patches)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("src = ...", "flat_mesh = ...", r"try_create_flattened binds flat_mesh no times"),
        ("src = ...", "outermost_info = ...", r"try_create_flattened binds outermost_info 3 times"),
        ("del tensor_dim_size", "del old_size", r"try_create_flattened binds no old_size, and .* takes that out"),
        ("del ", "min(..., default=0)\n        del ", r"has no call of min that lacks what .* gives it"),
        ("def try_create_flattened", "def try_it", r"_optimize_transform_infos\.try_it isn't there"),
        ("def _optimize_transform_infos", "def _optimize", r"safe-merging\.md carries no row for .*:_optimize$"),
        ("src = ...", "return None", r"has no definition that ends with 'name = \.\.\.'"),
        ("src = ...", "mesh.flat = ...", r"needs lines to insert and, at its end, one 'name = \.\.\.'"),
    ],
)
def test_an_insertion_without_its_place_is_refused_by_name(tmp_path, patches, old, new, words):
    file = patches / MERGING
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(StackError, match=words) as refused:
        first_patch(tmp_path, patches).files()
    assert MERGING in str(refused.value)


@pytest.mark.parametrize(
    ("there", "entries", "after"),
    [
        ("[a, b]", "[a, c]", "[a, b, c]"),
        ("[a, c]", "[a, c, d]", "[a, c, d]"),  # a later release has one of them
        ("{'a': 1}", "{'a': ..., 'c': 2}", "{'a': 1, 'c': 2}"),
        ("[b]", "[a, c]", None),
    ],
)
def test_a_list_or_dict_grows_by_what_it_lacks(tmp_path, there, entries, after):
    folder = tmp_path / "insert/some"
    folder.mkdir(parents=True)
    (folder / "file.py").write_text(f"def f():\n    {entries}\n    end = ...\n")
    found = read_insertions("some", "file.py", tmp_path).insertions
    module = cst.parse_module(f"def f():\n    x = {there}\n    end = 1\n")
    if after is None:
        with pytest.raises(StackError, match=r"f has no dict or list as patches/insert/some/file\.py names it"):
            insert(module, "file.py", found)
    else:
        assert f"x = {after}\n" in insert(module, "file.py", found).code


def test_an_insertion_into_no_file_of_torchs_is_refused(tmp_path, patches):
    (patches / MERGING).rename(patches / "insert/safe-merging/_rank_map.py")
    with pytest.raises(StackError, match=r"insert/safe-merging/_rank_map\.py is for no patch"):
        first_patch(tmp_path, patches).files()


def test_a_file_that_torch_has_is_refused(tmp_path):
    (small_tree(tmp_path) / "torch/distributed/_rank_map.py").write_text("")
    count = 1 + [message.name for message in MESSAGES].index("mesh-rank-map")
    with pytest.raises(StackError, match=r"torch/distributed/_rank_map\.py: the tree has a file of this name"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, count)


def test_a_definition_that_upstream_added_is_refused(tmp_path):
    file = small_tree(tmp_path) / "torch/distributed/device_mesh.py"
    method = "        def permute(self, names):\n            pass\n\n        def _get_root_mesh_dim("
    file.write_text(file.read_text().replace("        def _get_root_mesh_dim(", method))
    with pytest.raises(StackError, match=r"device_mesh\.py defines a DeviceMesh\.permute of its own"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, len(MESSAGES))


def test_a_form_for_nothing_is_refused(tmp_path):
    waiting = tmp_path / "patches/until/landed-long-ago"
    waiting.mkdir(parents=True)
    (waiting / "_rank_map.py").write_text("")
    tree = Tree.at(small_tree(tmp_path / "tree"))
    with pytest.raises(StackError, match=r"landed-long-ago/_rank_map\.py is for no patch"):
        Prefix(tree, MESSAGES, [], patches=tmp_path / "patches").files()


def test_a_statement_of_torchs_that_is_not_there_cannot_stay(tmp_path):
    copied = shutil.copytree(ROOT / "patches", tmp_path / "patches")
    for form in copied.rglob("until/mesh-checks/device_mesh.py"):
        form.write_text(form.read_text().replace('if device_type != "xla":', "if device_type is None:"))
    views = 1 + [message.name for message in MESSAGES].index("mesh-views")
    later = [message.name for message in MESSAGES[views:]]
    prefix = Prefix(Tree.at(small_tree(tmp_path / "tree")), MESSAGES[:views], later, patches=copied)
    with pytest.raises(StackError, match=r"__init__ has 0 statements 'if device_type is None:'"):
        prefix.files()


def test_a_folder_without_torch_is_refused(tmp_path, capsys):
    assert render_stack.main(["--onto", str(tmp_path)]) == 1
    assert "Give a PyTorch checkout" in capsys.readouterr().err


def test_a_file_for_a_folder_is_refused(tmp_path, capsys):
    (tmp_path / "out").write_text("mine\n")
    for out in (tmp_path / "out", tmp_path / "out/deeper"):
        assert render_stack.main(["--onto", str(small_tree(tmp_path / "tree")), "--out", str(out)]) == 1
        assert f"--out takes a folder to put files into, and {tmp_path / 'out'} is a file" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine\n"


def test_files_of_another_rendering_are_refused(tmp_path, capsys):
    (tmp_path / "0004-timeouts.patch").write_text("")
    assert render_stack.main(["--onto", str(small_tree(tmp_path / "tree")), "--out", str(tmp_path)]) == 1
    assert "has 0004-timeouts.patch of another rendering" in capsys.readouterr().err


def test_a_second_rendering_onto_the_same_tree_is_refused(tmp_path, capsys):
    small_tree(tmp_path)
    asked = ["--onto", str(tmp_path), "--only", "1"]
    assert render_stack.main(asked) == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.py")}
    assert render_stack.main(asked) == 1
    assert "test_redistribute.py, so the stack was rendered onto it already" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*.py")}


def test_a_syntax_error_is_refused_by_file_and_line(tmp_path, patches):
    file = small_tree(tmp_path / "tree") / "torch/distributed/tensor/_redistribute.py"
    whole = file.read_text()
    file.write_text(f"def broken(:\n{whole}")
    first = Prefix(Tree.at(tmp_path / "tree"), MESSAGES[:1], [], patches=patches)
    with pytest.raises(StackError, match=r"torch/distributed/tensor/_redistribute\.py:1 isn't Python"):
        first.files()
    file.write_text(whole)
    (patches / MERGING).write_text("\n\ndef broken(:\n")
    with pytest.raises(StackError, match=r"insert/safe-merging/tensor/_redistribute\.py:3 isn't Python"):
        first.files()


def test_it_says_what_to_install(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "expecttest" else found(name, *of)
    )
    with pytest.raises(StackError, match=r"need expecttest: pip install -e '\.\[test,dev\]'"):
        check.check(MESSAGES, [1])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "ruff" else found(name, *of))
    with pytest.raises(StackError, match=r"ruff, which isn't there: pip install -e '\.\[dev\]'"):
        Prefix(Tree.at(small_tree(tmp_path)), MESSAGES[:1], [message.name for message in MESSAGES[1:]]).files()


def test_files_that_a_head_names_come_without_a_caller(tmp_path):
    """And what they import; a name that no file of ours has is refused."""
    pure = dataclasses.replace(MESSAGES[0], name="pure", rows=(), tests=(), files=("tensor/_planner/boxes.py",))
    tree = Tree.at(small_tree(tmp_path))
    later = [message.name for message in MESSAGES]
    files = Prefix(tree, [pure], later).files()
    assert {"boxes.py", "__init__.py"} == {pathlib.PurePath(path).name for path in files}
    with pytest.raises(StackError, match=r"pure\.md: 'Files:' names nowhere\.py"):
        Prefix(tree, [dataclasses.replace(pure, files=("nowhere.py",))], later).files()
    with pytest.raises(StackError, match=r"pure\.md: 'Parts:' names nowhere\.py"):
        Prefix(tree, [dataclasses.replace(pure, files=(), parts=("nowhere.py",))], later).files()


def test_of_parts_comes_what_tests_use(tmp_path):
    """And members that a form leaves out don't."""
    tests = ("stack/test_planner_cost.py=distributed/tensor/test_planner_cost.py",)
    pure = dataclasses.replace(MESSAGES[0], name="pure", rows=(), tests=tests, parts=("tensor/_planner/cost.py",))
    tree = Tree.at(small_tree(tmp_path))
    names = [message.name for message in MESSAGES]
    digits = dataclasses.replace(MESSAGES[names.index("planner-digits")], tests=())  # their form is another patch's
    files = Prefix(tree, [digits, pure], [name for name in names if name != digits.name]).files()
    cost = files["torch/distributed/tensor/_planner/cost.py"]
    assert "def leaving(" in cost
    assert not [name for name in ("def by_speed(", "axes: tuple[", "round_bytes") if name in cost]


def test_a_probe_that_asks_for_what_is_not_there_yet_gets_the_rest(tmp_path):
    """`--check` gives the copies what tests look into; a definition that needs a later one can't come along."""
    count = [message.name for message in MESSAGES].index("mesh-rank-order") + 1
    later = [message.name for message in MESSAGES[count:]]
    probes = [("torch", "from torch.distributed import _mesh_groups")]
    files = Prefix(Tree.at(small_tree(tmp_path)), MESSAGES[:count], later, probes=probes).files()
    text = files["torch/distributed/_mesh_groups.py"]
    assert "def joint_groups_known(" in text, "which the next patches bring, and which needs nothing of theirs"
    assert "def joint_group_name(" not in text, "which asks is_apart, and that comes with mesh-apart"
    assert "torch/distributed/_settings.py" not in files, "no new files: what needs one can't come, as prepare"


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path):
    (tmp_path / "one.py").write_text("one\n")
    (tmp_path / "two.py").mkdir()
    with pytest.raises(StackError, match="can't be written"):
        write(tmp_path, {"one.py": "changed\n", "two.py": "text\n"})
    assert (tmp_path / "one.py").read_text() == "one\n" and not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("text", ["Title: no tag\n\nbody\n", "Title: [DTensor] x\n\n", "Titel: [DTensor] x\n\nbody\n"])
def test_a_message_that_lacks_something_is_refused(tmp_path, text):
    (tmp_path / "patch.md").write_text(text)
    with pytest.raises(StackError, match=r"patch\.md"):
        read_message(tmp_path / "patch.md")
