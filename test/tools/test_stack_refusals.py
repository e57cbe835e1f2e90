"""What the stack refuses, and with which words: trees, insertions, files and folders that aren't as they should be."""

import shutil

import pytest

from stack_trees import ROOT, small_tree

# isort: split
import render_stack
from stack.message import StackError, read_series
from stack.render import Prefix
from stack.tree import Tree

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
