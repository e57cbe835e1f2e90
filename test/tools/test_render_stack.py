"""The stack: what it carries, that it runs without the overlay, and that git takes it."""

import ast
import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import pytest

from stack_trees import INSTALLED, ROOT, small_tree

# isort: split
import render_stack
from stack.message import read_series
from stack.render import STAYS, missing_files
from stack.source import imports, is_import
from stack.tree import Tree, copy_torch, write

from stack import check, rules
from torch_overlay.patching.patch import Kind
from torch_overlay.series import PATCHES as ROWS
from width import NIGHTLY

MESSAGES = read_series()
NAMES = [message.name for message in MESSAGES]
LAYOUTS = "torch.distributed._mesh_layout"
pytestmark = pytest.mark.timeout(900)  # all prefixes are rendered, once for all tests here


def git(folder: pathlib.Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    ended = subprocess.run(["git", *identity, *command], cwd=folder, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def repository(folder: pathlib.Path) -> pathlib.Path:
    small_tree(folder)
    git(folder, "init", "-q")
    git(folder, "config", "user.name", "a")
    git(folder, "config", "user.email", "a@b")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    return folder


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Every file of the stack, before the first patch and after each."""
    tree = Tree.at(small_tree(tmp_path_factory.mktemp("tree")))
    return render_stack.states(tree, MESSAGES)


def test_every_row_is_carried_and_nothing_else():
    """But for what only the overlay needs, and what only upstream can change."""
    carried = {target for message in MESSAGES for target in message.rows}
    bodies = [row for row in ROWS if row.kind is not Kind.HOOK]
    rows = {row.target for row in bodies if not row.body.startswith("torch_overlay.compat.")}
    mesh, c10d = "torch.distributed.device_mesh", "torch.distributed.distributed_c10d"
    otherwise = {f"{c10d}:split_group", f"{c10d}:_process_group_name", f"{c10d}:_timeout_of"}
    otherwise |= {"torch.distributed.tensor._redistribute:_optimize_transform_infos"}
    otherwise |= {"torch.distributed._state_dict_utils:_distribute_tensors"}
    otherwise |= {f"{mesh}:_register_distributed_opaque_types"}
    removed = {target for message in MESSAGES for target in message.removes}
    assert {target for target in carried if not target.startswith(LAYOUTS)} - otherwise - removed == rows - removed


def test_every_member_of_a_layout_that_torch_lacks_goes_into_torchs_class():
    """Printing aside, which dataclasses do in their way there, and what caches an answer here."""
    from torch.distributed import _mesh_layout as torchs

    from torch_overlay.distributed import _mesh_layout as ours

    lacking = {
        f"{LAYOUTS}:{owner}.{name}"
        for owner in ("_FlatLayout", "_MeshLayout")
        for name, value in vars(getattr(ours, owner)).items()
        if name not in vars(getattr(torchs, owner)) and callable(value)
    }
    lacking -= {f"{LAYOUTS}:_FlatLayout.{name}" for name in ("__str__", "_compose_axis", "_compose_mode")}
    lacking = {target for target in lacking if not target.endswith(("state__", "_match_args__"))}
    assert lacking == {target for message in MESSAGES for target in message.rows if target.startswith(LAYOUTS)}


def test_every_file_of_ours_goes_upstream_whole(states):
    """Each in one patch, and as it stands: what the patch brings is what the last one leaves."""
    assert missing_files(MESSAGES) == set()
    assert all((ROOT / "torch_overlay/distributed" / file).is_file() for file in STAYS)
    for number, message in enumerate(MESSAGES, 1):
        for file in message.files:
            path = f"torch/distributed/{file}"
            assert states[number - 1][path] is None and states[number][path] == states[-1][path], path


def test_until_the_defaults_nothing_is_on(states):
    """The switches come off; each default is a line of torch's configuration."""
    text = [state["torch/distributed/config.py"] for state in states]
    off = text[NAMES.index("planned-redistribution") + 1]
    assert 'default="off"' in off and 'default="existing"' in off and "default=False" in off
    for name in ("shared-by-default", "planned-by-default"):
        count = NAMES.index(name) + 1
        changes = [change for change in rules.changes(*states[count - 1 : count + 1]) if not change.is_test]
        assert [change.path for change in changes] == ["torch/distributed/config.py"]
        assert len(changes[0].added) <= 3


def test_each_patch_changes_something_and_has_tests(states):
    """Its own, or those that its message names and a later patch brings."""
    for message, before, after in zip(MESSAGES, states, states[1:], strict=False):
        changed = {path for path in after if after[path] != before[path]}
        assert any(path.startswith("torch/") for path in changed), message.name
        named = re.findall(r"test_\w+\.py", message.body)
        assert any(path.endswith(f"/{test}") for path in states[-1] for test in named), message.name


def test_a_copy_that_is_committed_says_its_release(tmp_path):
    """Links to the files of the installed torch would be links in the commit, too."""
    copy_torch(INSTALLED, tmp_path)
    for words in (
        ["init", "-q"],
        ["add", "torch/version.py", "torch/distributed/device_mesh.py"],
        ["commit", "-qm", "a"],
    ):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)
    assert Tree.at(tmp_path, "HEAD").release == Tree.at(tmp_path).release
    assert not any(path.is_symlink() for path in (tmp_path / "torch").glob("*.py"))


@pytest.mark.skipif(not NIGHTLY, reason="ten seconds for who sends patches upstream: only at night")
def test_its_own_tests_pass_where_the_overlay_is_not(states, tmp_path):
    """On a copy of torch that carries the whole stack, without torch_overlay."""
    copy_torch(INSTALLED, tmp_path)
    write(tmp_path, dict(states[-1]))
    message = dataclasses.replace(MESSAGES[0], tests=("test_mesh_values.py=test_device_mesh_values.py",))
    text = (ROOT / "test/stack/test_mesh_values.py").read_text().replace("torch_overlay.", "torch.")
    alone = "\n\ndef test_alone():\n    import sys\n    assert sys.modules['torch_overlay'] is None\n"
    (tmp_path / "test/distributed/test_device_mesh_values.py").write_text(text + alone)
    assert set(check.own_tests([message], tmp_path).values()) == {"passed"}


def test_c10d_does_not_import_the_mesh(states):
    """The names of groups are made there, by the standard library alone; the mesh imports it."""
    text = states[-1]["torch/distributed/distributed_c10d.py"]
    ours = {path.removesuffix(".py").replace("/", ".") for path in states[-1] if states[0][path] is None}
    body = [node for node in ast.walk(ast.parse(text)) if is_import(node)]
    asked = {one.home for one in imports(body, "torch.distributed")}
    assert "class MemberNames" in text and "torch._C._distributed_c10d" in asked and not asked & ours


WITHOUT_C10D = """
import sys, torch
for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
    del sys.modules[name]
del torch._C._c10d_init
sys.modules["torch._C._distributed_c10d"] = None
from torch.distributed import device_mesh
print(device_mesh.__file__, device_mesh.DeviceMesh.__name__)
"""


@pytest.mark.skipif(not NIGHTLY, reason="ten seconds for who sends patches upstream: only at night")
def test_meshes_are_imported_without_c10d(states, tmp_path):
    """On builds without it DeviceMesh is a stub; all that the stack imports there stands behind that question."""
    patched = copy_torch(INSTALLED, tmp_path)
    write(patched, states[-1])
    env = {**os.environ, "PYTHONPATH": str(patched)}
    ended = subprocess.run([sys.executable, "-c", WITHOUT_C10D], env=env, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == [str(patched / "torch/distributed/device_mesh.py"), "_DeviceMeshStub"], ended.stderr


@pytest.fixture
def known(states, monkeypatch):
    """The states stand for rendering them again."""
    monkeypatch.setattr(render_stack, "states", lambda tree, messages: states[: len(messages) + 1])


def test_git_takes_the_files(known, states, tmp_path):
    """One commit for each patch, or for the first of them; a second rendering takes the place of the first."""
    folder = repository(tmp_path / "repo")
    for arguments, count in ((["--only", "2"], 2), ([], len(MESSAGES))):
        assert render_stack.main(["--onto", str(folder), "--commit", *arguments]) == 0
        assert git(folder, "rev-list", "--count", "HEAD") == str(1 + count)
    for path, text in states[-1].items():
        assert (folder / path).read_text() == text, path
    assert git(folder, "log", "-1", "--format=%s by %an <%ae>") == f"{MESSAGES[-1].title} by a <a@b>"
