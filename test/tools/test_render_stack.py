"""The stack: what it carries, that its bytes are stable, and that git and ghstack take it."""

import ast
import asyncio
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from stack_trees import INSTALLED, PACKAGES, ROOT, TOUCHED, small_tree

# isort: split
import render_stack
from stack.message import read_series
from stack.render import LAYOUTS
from stack.room import read_words
from stack.tree import Tree, write
from stack.typing_errors import check_types

from stack import check, history, rules, runs, wrap
from torch_overlay.patching.patch import Kind
from torch_overlay.series import PATCHES as ROWS

MESSAGES = read_series()
pytestmark = pytest.mark.timeout(900)  # thirty prefixes are rendered, once for all tests here


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
    return render_stack.states(tree, MESSAGES, len(MESSAGES))


def test_every_row_is_carried_and_nothing_else():
    carried = {target for message in MESSAGES for target in message.rows}
    rows = [row for row in ROWS if row.kind is not Kind.HOOK]
    # Layouts are ours in the overlay; upstream their members go into torch's classes, which the overlay leaves alone.
    carried = {target for target in carried if not target.startswith(LAYOUTS)}
    carried.remove("torch.distributed.distributed_c10d:split_group")  # whose call the overlay can't reach
    carried.remove("torch.distributed.device_mesh:_register_distributed_opaque_types")  # a hook does it in the overlay
    carried.add("torch.distributed.device_mesh:_maybe_traced_group")  # upstream has it where graphs are for all ranks
    carried.remove("torch.distributed.device_mesh:DeviceMesh.__setstate__")  # the overlay's reads files of 2.9 first
    assert carried == {row.target for row in rows if not row.body.startswith("torch_overlay.compat.")}


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


def test_every_file_of_ours_goes_upstream(states):
    ours = {path.relative_to(ROOT / "torch_overlay").as_posix() for path in (ROOT / "torch_overlay").rglob("*.py")}
    ours = {
        f"torch/{path}"
        for path in ours
        if path.startswith("distributed/")
        and not path.endswith(("_kept.py", "_torch_layout.py", "_torch_debug_mode.py"))
    }
    # Torch has a config.py of its own, into which the switches go; ours is for tests.
    assert ours - {*PACKAGES} == {path for path in states[-1] if path.startswith("torch/")}


def test_nothing_says_where_it_came_from(states):
    for path, text in states[-1].items():
        assert "overlay" not in text.lower(), path
    for message in MESSAGES:
        assert "overlay" not in history.text_of(message).lower(), message.name


def test_an_insertion_changes_nothing_else(states):
    """The lines stand before the statement that they name; besides, only what they make superfluous goes."""
    before, after = (state["torch/distributed/tensor/_redistribute.py"].splitlines() for state in states[:2])
    gone = [i for i, line in enumerate(before) if "tensor_dim_size" in line]
    del before[gone[0] : gone[-1] + 2]  # from the first line that binds the name to what the `if` on it returned
    left = iter(after)
    assert all(line in left for line in before), "every other line of torch's is there, in its order"
    at = next(i for i, line in enumerate(after) if line.endswith("not _cuts_evenly(infos, device_mesh)")) + 1
    assert after[at + 1].endswith('return None, "uneven_tensor_shape"')
    assert "src, dst = first_placements" in "".join(after[at + 2 : at + 10])


def test_a_body_takes_the_place_of_what_a_patch_before_inserted(states):
    """Timeouts are lines in torch's function until a body of ours replaces it; their test passes with both."""
    texts = [state["torch/distributed/device_mesh.py"].count("timeout_of(") for state in states]
    names = [message.name for message in MESSAGES]
    first, last = names.index("timeouts") + 1, names.index("mesh-one-way")
    assert texts == [1 * (first <= i <= last) for i in range(len(states))]


def test_a_statement_of_torchs_stays_where_a_form_says_so(states):
    """With its comments, until the constructor checks names and ranks."""
    todo = "# TODO(yeounoh) implement DeviceMesh backend and register XLA backend.\n            if device_type"
    last = [message.name for message in MESSAGES].index("mesh-checks")
    there = [todo in state["torch/distributed/device_mesh.py"] for state in states]
    assert there == [i <= last for i in range(len(states))]


def test_every_phrase_that_upstream_says_otherwise_is_one_of_ours(states):
    """Else it replaces nothing any more; what names a switch is itself no phrase of ours, so that nothing is left."""
    ours = [path.read_text() for path in (ROOT / "torch_overlay/distributed").rglob("*.py")]
    names = [message.name for message in MESSAGES]
    for_good = read_words(ROOT / "patches", [])
    until = {name: {*read_words(ROOT / "patches", [name])} - {*for_good} for name in names}
    for later, words in [("", for_good), *until.items()]:
        shown = states[: 1 + names.index(later)] if later else states
        for phrase, _ in words:
            assert any(phrase in text for text in ours), phrase
            assert not any(phrase in text for state in shown for text in state.values() if text), phrase
    hints = [state["torch/distributed/_process_groups.py"] or "" for state in states]
    assert ["mesh_check" in text for text in hints] == [i > names.index("check-mesh") for i in range(len(states))]


def test_public_methods_differ_from_ours_by_their_docstrings_alone():
    """`patches/instead/device_mesh.py` has them whole, with what upstream's page shows of them."""
    ours, theirs = (
        {f.name: f for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.FunctionDef)}
        for path in (ROOT / "torch_overlay/distributed/device_mesh.py", ROOT / "patches/instead/device_mesh.py")
    )
    assert {*theirs} == {"flatten", "unflatten", "concatenate"}
    for name, form in theirs.items():
        assert "Args:" in ast.get_docstring(form) and "Raises:" in ast.get_docstring(form)
        alike = [ast.dump(ast.Module([f.args, *f.body[1:]], [])) for f in (form, ours[name])]
        assert alike[0] == alike[1], name


def test_what_a_patch_removes_is_gone_with_its_imports(states):
    """From the patch on which nothing calls it, and not before."""
    names = [message.name for message in MESSAGES]
    texts = [state["torch/distributed/device_mesh.py"] for state in states]
    for name, patch in (("_init_process_groups", "mesh-reshape"), ("_init_one_process_group", "mesh-one-way")):
        assert [name in text for text in texts] == [i <= names.index(patch) for i in range(len(texts))]
    assert "split_group" in texts[0] and "split_group" not in texts[-1]


def test_each_patch_changes_something_and_brings_its_tests(states):
    """What lands before its callers is tested with them, and its message says by which file."""
    for message, before, after in zip(MESSAGES, states, states[1:], strict=False):
        changed = {path for path in after if after[path] != before[path]}
        assert any(path.startswith("torch/") for path in changed), message.name
        if not any(path.startswith("test/") for path in changed):
            named = re.findall(r"test_\w+\.py", message.body)
            assert any(path.endswith(f"/{test}") for path in states[-1] for test in named), message.name


def test_no_patch_is_larger_than_reviewers_read(states):
    """500 added lines without tests, but for those that say why."""
    for message, before, after in zip(MESSAGES, states, states[1:], strict=False):
        added = sum(len(change.added) for change in rules.changes(before, after) if not change.is_test)
        assert added <= rules.SIZE or message.size, f"{message.name}: {added}"


def test_a_definition_comes_with_its_first_use(states):
    """A file of ours isn't brought whole by the first patch that needs one function of it."""
    tables = [state["torch/distributed/_mesh_groups.py"] or "" for state in states]
    names = [message.name for message in MESSAGES]
    assert "def make_groups(" in tables[names.index("mesh-making-groups") + 1]
    first = names.index("mesh-joint-names") + 1
    assert ["def joint_group_name(" in text for text in tables] == [i >= first for i in range(len(states))]
    assert not any("def prepare(" in text for text in tables), "which nothing upstream calls"


def test_c10d_does_not_import_the_mesh(states):
    """What it asks for the name of a group is a file that imports the standard library only."""
    texts = [states[-1][f"torch/distributed/{name}.py"] for name in ("distributed_c10d", "_member_names")]
    ours = {path.removesuffix(".py").replace("/", ".") for path in states[-1] if states[0][path] is None}
    asked = [{line.split()[1] for line in t.splitlines() if re.match(r" *(from|import) torch", line)} for t in texts]
    assert asked[0] & ours == {"torch.distributed._member_names"} and asked[1] == set()


WITHOUT_C10D = """
import sys, torch
for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
    del sys.modules[name]
del torch._C._c10d_init
sys.modules["torch._C._distributed_c10d"] = None
from torch.distributed import device_mesh
print(device_mesh.__file__, device_mesh.DeviceMesh.__name__)
"""


def test_meshes_are_imported_without_c10d(states, tmp_path):
    """On builds without it DeviceMesh is a stub; all that the stack imports there stands behind that question."""
    from stack.copied import copy_torch

    patched = copy_torch(INSTALLED, tmp_path)
    write(patched, states[-1])
    env = {**os.environ, "PYTHONPATH": str(patched)}
    ended = subprocess.run([sys.executable, "-c", WITHOUT_C10D], env=env, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == [str(patched / "torch/distributed/device_mesh.py"), "_DeviceMeshStub"], ended.stderr


def test_torchs_own_words_stay(states):
    """Where torch documents a function, its docstring and the types of its parameters do not change."""
    import ast

    before, after = (ast.parse(state["torch/distributed/device_mesh.py"]) for state in (states[0], states[-1]))
    told = [
        next(
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "init_device_mesh" and n.args.args
        )
        for tree in (before, after)
    ]
    assert ast.get_docstring(told[0]) == ast.get_docstring(told[1]) and "Example" in ast.get_docstring(told[1])
    assert ast.dump(told[0].args) == ast.dump(told[1].args)


def test_a_parameter_that_takes_more_says_so(states):
    """The constructor takes a RankMap beside a tensor, and of its other parameters torch's types stay."""
    import ast

    taken = []
    for state in (states[0], states[-1]):
        tree = ast.parse(state["torch/distributed/device_mesh.py"])
        (mesh,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "DeviceMesh"]
        (init,) = [n for n in mesh.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        taken.append({a.arg: ast.unparse(a.annotation) for a in init.args.args + init.args.kwonlyargs if a.annotation})
    before, after = taken
    assert after.pop("_rank_map") == "RankMap | " + before.pop("_rank_map")
    assert {name: after[name].strip("'") for name in before} == {name: said.strip("'") for name, said in before.items()}


def digest(state) -> str:
    return hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()


def test_a_switch_changes_where_it_stands(states):
    """A default that changes is a line or two of torch's configuration, not a definition that moves."""
    count = 1 + [message.name for message in MESSAGES].index("shared-by-default")
    change, mesh = [c for c in rules.changes(*states[count - 1 : count + 1]) if not c.is_test]
    assert mesh.path.endswith("device_mesh.py") and len(mesh.added) <= 5, "a check that only the old way needs"
    assert change.removed <= 3 and len(change.added) <= 3, sorted(change.lines())


def test_a_comment_that_is_too_wide_goes_above_its_line():
    code, comment = "x = " + "a + " * 10 + "a", "# " + "why " * 15
    text = f"def f():\n    {code}  {comment.strip()}\n    {code}  # noqa: {'E' * 60}\n"
    lines = ["def f():", f"    {comment.strip()}", f"    {code}", text.splitlines()[-1]]
    assert wrap.comments_above(text, frozenset()).splitlines() == lines
    assert wrap.comments_above(text, frozenset(text.splitlines())) == text, "what torch has stays"


def test_the_comparison_hides_nothing():
    """A test that fails on the patched torch shows, however it ended before; so does one that is gone."""
    before = {"a": "failed (1 != 2)", "b": "passed", "c": "passed", "d": "passed", "e": "skipped", "f": "passed"}
    after = {"a": "failed (1 != 2)", "b": "skipped", "c": "left out", "e": "skipped"}
    after["f"] = "failed (AttributeError: 'DeviceMesh' object has no attribute 'permute')"
    assert [line.partition(":")[0] for line in check.compare(before, after, {"permute"})] == ["a", "b", "d"]
    assert "f" in [line.partition(":")[0] for line in check.compare(before, after, {"flatten"})]
    stuck = {"test/mesh": "failed (pytest didn't get through, exit 2: ['5 errors'])"}
    assert check.compare(before, stuck) == [f"test/mesh: {stuck['test/mesh']}"], "and not all that is missing"


@pytest.mark.parametrize(
    "said",
    [
        "AttributeError: 'DeviceMesh' object has no attribute 'permute'",
        "Explanation: Member 'permute' is not registered",
    ],
    ids=["in a rank", "in compiled code"],
)
def test_a_member_that_is_not_there_yet_is_found_where_it_is_said(said):
    failure = ET.Element("failure", message="RuntimeError: Exception in worker process:")
    failure.text = f"RuntimeError: Exception in worker process:\nE   {said}\nE   more"
    case = ET.Element("testcase")
    case.append(failure)
    before, after = {"a": "passed"}, {"a": runs._outcome(case)}
    assert check.compare(before, after, {"permute"}) == [] != check.compare(before, after, {"flatten"})


def test_what_failed_runs_once_more(monkeypatch):
    """Its file alone; but not where a member is missing, which no second run brings."""
    twin, scale = "test.mesh.test_mesh_twin.test_a[x.y]", "test.mesh.test_mesh_scale.TestScale.test_b"
    lacks, asked = "failed (AttributeError: 'DeviceMesh' object has no attribute 'permute')", []

    def run(suites, way, patched):
        asked.append(list(suites))
        if len(asked) == 1:
            return {twin: "failed (timeout)", scale: lacks, "test.mesh.test_mesh_twin.test_c": "passed"}
        return {twin: "passed", "test.mesh.test_mesh_twin.test_c": "passed"}

    monkeypatch.setattr(runs, "_run", run)
    ended = runs.results(["test/mesh"], "patched")
    assert asked[1:] == [["test/mesh/test_mesh_twin.py"]] and ended[twin] == "passed" and ended[scale] == lacks
    ends = iter([{"test/mesh": f"failed ({runs.NOT_THROUGH}, exit 3: [])"}, {"a": "passed"}])
    monkeypatch.setattr(runs, "_run", lambda suites, way, patched: next(ends))
    assert runs.results(["test/mesh"], "patched") == {"a": "passed"}


def test_a_suite_that_hangs_is_killed_with_its_ranks(monkeypatch):
    monkeypatch.setattr(runs, "LIMIT", 1)
    rank = "import time; time.sleep(3600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"  # the rank holds the pipe, too
    assert runs._ended([sys.executable, "-c", code], os.environ) == (-9, "killed after 1 s")
    assert runs._ended([sys.executable, "-c", "print(5)"], os.environ) == (0, "5\n")


def test_each_prefix_is_held_to_what_it_should_be(monkeypatch, capsys, tmp_path):
    """The whole stack to the overlay, a shorter one to torch as it is and to the tests that its patches bring."""
    asked, broken, names = [], False, [message.name for message in MESSAGES]

    def results(suites, way, patched=None):
        asked.append((tuple(suites), way, patched is not None))
        return {"one": "failed (2 != 3)" if broken and patched else "passed"}

    def patched(messages, count, folder):
        changed = frozenset() if count == pure else frozenset({"torch/distributed/device_mesh.py"})
        return check.Patched(messages, count, folder, changed, frozenset())

    monkeypatch.setattr(check, "results", results)
    monkeypatch.setattr(check, "random_moves", lambda patched: "identity 4" if patched is None else "identity 0")
    monkeypatch.setattr(check, "patched", patched)
    monkeypatch.setattr(check, "_program", lambda messages, count: f"program {count}")
    monkeypatch.setattr(check, "_commit", lambda: "c0ffee")
    checked = tmp_path / "checked.csv"
    pure, shared = names.index("planner-senders") + 1, names.index("shared-by-default") + 1
    assert check.check(MESSAGES, [1, pure, shared, len(MESSAGES)], checked=checked) == 0
    first, *_ = MESSAGES[0].tests[0].split("=")
    moves, meshes = ("test/redistribute",), ("test/mesh",)
    assert asked[:3] == [(moves, "stock", True), (moves, "stock", False), ((f"test/{first}",), "patched", True)]
    (own, *_), *rest = asked[3:]
    assert own == tuple(f"test/{test.partition('=')[0]}" for test in MESSAGES[pure - 1].tests), (
        "no suite, its own tests"
    )
    assert rest[:2] == [(meshes, "patched", True), (meshes, "overlay", False)]
    (brought, *_), *rest = rest[2:]
    assert f"test/{first}" in brought
    assert [suite for suite, way, _ in rest if way == "patched"][:3] == [meshes, moves, ("test/pure",)]
    said = capsys.readouterr().out
    assert "| torch as it is |  |  |  |  | identity 4 |" in said
    assert "| 1 `safe-merging` | as before | 1 | as before | 1 | identity 0 | c0ffee |" in said
    assert f"| {pure} `planner-senders` | as before | as before | as before | 1 | as before | c0ffee |" in said
    asked, broken = [], True
    assert check.check(MESSAGES, [1, pure, shared, len(MESSAGES)], checked=checked) == 0
    assert asked == [] and capsys.readouterr().out == said, "what ran, and is the same program, is read"
    assert check.check(MESSAGES, [len(MESSAGES)], ["test/mesh"], checked) == 1
    assert f"`{names[-1]}` | 1, 1 differ | as before | as before | 1, 1 differ |" in capsys.readouterr().out
    monkeypatch.setattr(check, "_program", lambda messages, count: "another program")
    for _ in range(2):
        assert check.check(MESSAGES, [1], checked=checked) == 1, "what differs isn't kept, and runs again"


def test_types_are_right_with_the_whole_stack_and_wrong_ones_are_found(states, capsys):
    """`--types` asks after each patch. What torch as it is has wrong doesn't count."""
    home = "torch/distributed/device_mesh.py"
    whole = {path: text for path, text in states[-1].items() if path.startswith("torch/")}
    planted = {**whole, home: whole[home] + "\n\ndef wrong() -> int:\n    return DeviceMesh.nothing\n"}
    assert check_types(["whole", "planted", "whole"], [states[0], whole, planted, whole]) == 1
    patch, found, sums = capsys.readouterr().out.splitlines()
    assert patch == "2 `planted`" and sums == "3 patches, 1 with type errors that torch as it is doesn't have"
    assert found.startswith(f"  ERROR {home} ") and "`nothing`" in found


def test_no_tool_hides_a_module_of_pythons():
    """`random_moves.py` runs as a program, with its folder first on the path."""
    assert not {path.stem for path in (ROOT / "tools/stack").glob("*.py")} & sys.stdlib_module_names


def test_a_patch_between_two_others_makes_no_other_program_of_the_next(monkeypatch):
    monkeypatch.setattr(check, "_files", lambda states, count: {"a.py": f"x = {states[count]}"})
    assert check._program((0, 1, 2, 3), 3) == check._program((0, 0, 1, 2, 3), 4)
    assert check._program((0, 1, 2, 3), 3) not in [check._program((0, 1, 4, 3), 3), check._program((0, 1, 2, 4), 3)]


def test_what_torchs_own_files_import_runs_and_other_files_are_idle():
    files = {
        "torch/distributed/mesh.py": "from ._state import state",
        "torch/distributed/_state.py": "def ask():\n    from .tensor import _late",
        "torch/distributed/tensor/_late.py": "import torch.distributed._dotted",
        "torch/distributed/_dotted.py": "",
        "torch/distributed/_idle.py": "from ._state import state",
    }
    assert check._running(files, ["torch/distributed/mesh.py"]) == {*files} - {"torch/distributed/_idle.py"}


def test_idle_files_bring_their_tests_again(tmp_path):
    """The tests of a patch that changes one, and the tests of others that ask for it; all where a file runs."""
    names = [message.name for message in MESSAGES]
    count, regions = names.index("planner-orders") + 1, "torch/distributed/tensor/_planner/regions.py"
    idle = check.Patched(MESSAGES, count, tmp_path, frozenset(), frozenset({regions}))
    assert idle.tests == ["stack/test_planner_regions.py", "stack/test_planner_orders.py"]
    assert len(check.Patched(MESSAGES, count, tmp_path, frozenset({regions}), frozenset()).tests) > 2


def test_pure_tests_run_where_all_is_there_that_they_ask_for(tmp_path):
    count = [message.name for message in MESSAGES].index("rank-views") + 1
    layouts, new = "torch/distributed/_mesh_layout.py", {f"torch/distributed/{f}" for f in MESSAGES[count - 1].files}
    write(tmp_path, dict.fromkeys([*new, layouts, "torch/distributed/_rank_map.py"], ""))
    found = check.Patched(MESSAGES, count, tmp_path, frozenset(), frozenset(new)).pure_tests()
    assert found == ["test/pure/test_rank_map.py"], (
        "tests of plans ask for what comes later, those of layouts ran before"
    )
    found = check.Patched(MESSAGES, count, tmp_path, frozenset({layouts}), frozenset()).pure_tests()
    assert found == ["test/pure/test_mesh_layout.py", "test/pure/test_rank_map.py"]


def test_what_later_patches_tell_the_compiler_is_not_missed_yet(tmp_path):
    """With `permute` there, compiled code can't call it until the patch that registers it."""
    names = [message.name for message in MESSAGES]
    later = {
        name: check.Patched(MESSAGES, names.index(name) + 1, tmp_path, frozenset(), frozenset()).later for name in names
    }
    assert {"permute", "submesh_at"} < later["mesh-submesh-at"] and "submesh_at" in later["mesh-traced"]
    assert "permute" not in later["mesh-traced"] and not {"permute", "submesh_at", "_flatten"} & later["mesh-traced-at"]


def test_bytes_are_stable(states, tmp_path):
    """Another process, in which sets and dicts of text have another order."""
    code = f"""import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tools")!r}]
import hashlib, render_stack
from stack.message import read_series; from stack.tree import Tree
state = render_stack.rendered(Tree.at({str(small_tree(tmp_path))!r}), read_series(), {len(MESSAGES)})
print(hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest())"""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == digest(states[-1])  # the last state is the last prefix


@pytest.fixture
def known(states, monkeypatch):
    """The states stand for rendering them again."""
    monkeypatch.setattr(render_stack, "states", lambda tree, messages, count: states[: count + 1])


def test_commits_keep_the_trailers_of_those_before(known, tmp_path):
    folder = repository(tmp_path)
    assert render_stack.main(["--onto", str(folder), "--commit"]) == 0
    titles = git(folder, "log", "--reverse", "--format=%s").splitlines()
    assert titles == ["base", *(message.title for message in MESSAGES)]
    assert git(folder, "status", "--porcelain") == ""
    tree, head = git(folder, "rev-parse", "HEAD^{tree}"), git(folder, "rev-parse", "HEAD")
    assert render_stack.main(["--onto", str(folder), "--commit"]) == 0
    assert git(folder, "rev-parse", "HEAD") == head, "rendered again, the same commits"
    trailer = "ghstack-source-id: 0123abcd\nPull-Request: https://github.com/pytorch/pytorch/pull/1"
    git(folder, "commit", "-q", "--amend", "-m", git(folder, "log", "-1", "--format=%B") + f"\n\n{trailer}")
    assert render_stack.main(["--onto", str(folder), "--commit"]) == 0
    assert git(folder, "log", "-1", "--format=%B").endswith(trailer)
    assert git(folder, "rev-parse", "HEAD^{tree}") == tree
    assert render_stack.main(["--onto", str(folder), "--commit", "--only", "1"]) == 1, "it would drop the trailer"
    assert git(folder, "log", "-1", "--format=%B").endswith(trailer)


def test_a_commit_is_read_as_the_files_are(tmp_path):
    folder, count = repository(tmp_path), [message.name for message in MESSAGES].index("rank-views") + 1
    lying, committed = (render_stack.rendered(Tree.at(folder, at), MESSAGES, count) for at in (None, "HEAD"))
    assert lying == committed


def test_changes_that_are_not_committed_are_refused(known, tmp_path, capsys):
    folder = repository(tmp_path)
    (folder / TOUCHED[0]).write_text("mine\n")
    assert render_stack.main(["--onto", str(folder), "--commit"]) == 1
    assert "commit or stash them first" in capsys.readouterr().err
    assert git(folder, "log", "--format=%s") == "base"


def test_git_takes_the_files(known, states, tmp_path):
    folder = repository(tmp_path / "repo")
    assert render_stack.main(["--onto", str(folder), "--out", str(tmp_path / "out")]) == 0
    files = sorted((tmp_path / "out").iterdir())
    assert render_stack.main(["--onto", str(folder), "--out", str(tmp_path / "two"), "--only", "2"]) == 0
    assert [file.name for file in sorted((tmp_path / "two").iterdir())] == [file.name for file in files[:2]]
    assert [file.name for file in files] == [f"{i:04}-{m.name}.patch" for i, m in enumerate(MESSAGES, 1)]
    git(folder, "am", "-q", "--keep-non-patch", *map(str, files))
    for path, text in states[-1].items():
        assert (folder / path).read_text() == text, path
    assert git(folder, "log", "-1", "--format=%s by %an <%ae>") == f"{MESSAGES[-1].title} by a <a@b>"


def test_ghstack_reads_the_messages():
    trailers = pytest.importorskip("ghstack.trailers", reason="ghstack comes with '.[dev]'")
    for message in MESSAGES:
        text = history.text_of(message)
        assert trailers.parse_message(text) == (message.title, message.body.strip(), "")
        added = trailers.interpret_trailers(text, ["ghstack-source-id: 0123abcd"])
        assert trailers.parse_message(added)[2] == "ghstack-source-id: 0123abcd"


def test_ghstack_submits_the_stack(known):
    """To ghstack's own stand-in for GitHub: one pull request a patch, each on the one before."""
    prelude = pytest.importorskip("ghstack.test_prelude", reason="ghstack comes with '.[dev]'")

    async def submit():
        async with prelude.scoped_test(False):
            sh = prelude.get_sh()
            repository(pathlib.Path(sh.cwd))
            git(pathlib.Path(sh.cwd), "push", "-q", "--force", "origin", "HEAD")
            git(pathlib.Path(sh.cwd), "fetch", "-q", "origin")
            assert render_stack.main(["--onto", sh.cwd, "--commit"]) == 0
            made = await prelude.gh_submit("first")
            return [meta.title for meta in made], git(
                pathlib.Path(sh.cwd), "log", f"-{len(MESSAGES)}", "--reverse", "--format=%B"
            )

    titles, log = asyncio.run(submit())
    assert sorted(titles) == sorted(message.title for message in MESSAGES)
    assert log.count("ghstack-source-id") == len(MESSAGES)


def test_a_broken_body_shows_up_in_the_comparison(states, tmp_path):
    """On a copy that carries the whole stack tests pass, as they do under the overlay here; with a broken body, not."""
    from stack.copied import copy_torch

    patched = copy_torch(INSTALLED, tmp_path)
    write(patched, states[-1])
    shown = "test_slices_have_the_ranks_of_their_axes"  # its file has slower ones, which would show no more
    tests = [f"test/stack/test_mesh_slices.py::TestMeshSlices::{shown}", "test/stack/test_mesh_check.py"]
    before = check.results(tests, "patched", patched)
    assert set(before.values()) == {"passed"}
    axes = patched / "torch/distributed/_mesh_axes.py"
    text = axes.read_text()
    assert "return _MeshLayout(tuple(axes))" in text
    axes.write_text(text.replace("return _MeshLayout(tuple(axes))", "return _MeshLayout(tuple(axes[::-1]))"))
    differing = check.compare(before, check.results(tests, "patched", patched))
    (line,) = [line for line in differing if shown in line]
    assert "passed before, failed (AssertionError: " in line, line
    assert not any("test_mesh_check" in line for line in differing)
