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


def test_removing_what_is_not_there_is_refused(tmp_path):
    """As is removing what somebody changed: it may have a new caller, or a fix."""
    file = small_tree(tmp_path) / "torch/distributed/device_mesh.py"
    text = file.read_text()
    file.write_text(text.replace("def _init_process_groups(", "def _init_other_groups("))
    count = 1 + [message.name for message in MESSAGES].index("mesh-wiring")
    with pytest.raises(StackError, match=r"device_mesh\.py defines no DeviceMesh\._init_process_groups, which a patch"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, count)
    file.write_text(text.replace("pg_name = None\n", "pg_name = ''\n", 1))
    with pytest.raises(StackError, match=r"DeviceMesh\._init_one_process_group: .* with another body than any release"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, len(MESSAGES))


MERGING = "insert/merging/tensor/_redistribute.py"


@pytest.fixture
def patches(tmp_path):
    """A copy of `patches/` for planted breaches, of the first patch only."""
    copied = shutil.copytree(ROOT / "patches", tmp_path / "patches")
    for others in [folder for folder in (copied / "insert").iterdir() if folder.name != "merging"]:
        shutil.rmtree(others)
    return copied


def first_patch(tmp_path, patches) -> Prefix:
    return Prefix(Tree.at(small_tree(tmp_path / "tree")), read_series(patches)[:1], patches=patches)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("src = ...", "flat_mesh = ...", r"try_create_flattened binds flat_mesh no times"),
        ("src = ...", "outermost_info = ...", r"try_create_flattened binds outermost_info 3 times"),
        ("del tensor_dim_size", "del old_size", r"try_create_flattened binds no old_size, and .* takes that out"),
        ("del ", "min(..., default=0)\n        del ", r"has no call of min that lacks what .* gives it"),
        ("def try_create_flattened", "def try_it", r"_optimize_transform_infos\.try_it isn't there"),
        ("def _optimize_transform_infos", "def _optimize", r"merging\.md carries no row for .*:_optimize$"),
        ("src = ...", "return None", r"try_create_flattened has nothing that ends with 'name = \.\.\.'"),
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


def test_a_file_that_torch_has_is_refused(tmp_path):
    file = small_tree(tmp_path) / "torch/distributed/_mesh/rank_map.py"
    file.parent.mkdir()
    file.write_text("")
    count = 1 + [message.name for message in MESSAGES].index("mesh-values")
    with pytest.raises(StackError, match=r"torch/distributed/_mesh/rank_map\.py: the tree has a file of this name"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, count)


def test_a_definition_that_upstream_added_is_refused(tmp_path):
    file = small_tree(tmp_path) / "torch/distributed/device_mesh.py"
    method = "        def permute(self, names):\n            pass\n\n        def _get_root_mesh_dim("
    file.write_text(file.read_text().replace("        def _get_root_mesh_dim(", method))
    with pytest.raises(StackError, match=r"device_mesh\.py defines a DeviceMesh\.permute of its own"):
        render_stack.rendered(Tree.at(tmp_path), MESSAGES, len(MESSAGES))


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
    first = Prefix(Tree.at(tmp_path / "tree"), MESSAGES[:1], patches=patches)
    with pytest.raises(StackError, match=r"torch/distributed/tensor/_redistribute\.py:1 isn't Python"):
        first.files()
    file.write_text(whole)
    (patches / MERGING).write_text("\n\ndef broken(:\n")
    with pytest.raises(StackError, match=r"insert/merging/tensor/_redistribute\.py:3 isn't Python"):
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
        Prefix(Tree.at(small_tree(tmp_path)), MESSAGES[:1]).files()


def test_a_name_that_no_new_file_of_ours_has_is_refused(tmp_path):
    pure = dataclasses.replace(MESSAGES[0], name="pure", rows=(), tests=(), files=("tensor/_planner/regions.py",))
    tree = Tree.at(small_tree(tmp_path))
    files = Prefix(tree, [pure]).files()
    assert {"regions.py", "__init__.py"} == {pathlib.PurePath(path).name for path in files}
    with pytest.raises(StackError, match=r"pure\.md: 'Files:' names nowhere\.py"):
        Prefix(tree, [dataclasses.replace(pure, files=("nowhere.py",))]).files()


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
