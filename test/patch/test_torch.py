"""The series on the running torch: every row applies, leaves no trace, and is what its declaration says."""

import gc
import importlib
import inspect
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from hypothesis import settings

import torch_overlay
from torch_overlay import errors, series, versions
from torch_overlay.patching import engine, patch
from torch_overlay.patching.patch import Kind

ROOT = Path(__file__).parents[2]
OURS = Path(torch_overlay.__file__).parent
RELEASE = versions.running()
ROWS = [row for row in series.PATCHES if RELEASE.in_range(row)]
OUT_OF_RANGE = [row for row in series.PATCHES if not RELEASE.in_range(row)]
# What imports nearly all of torch.distributed, so that every by-name copy is there to be seen.
WIDE = (
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.experimental._tp_transform",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed._local_tensor",
    "torch.testing._internal.distributed._tensor.common_dtensor",
)


def row_id(row):
    return f"{row.qualname or row.module}-{row.kind.name.lower()}"


@pytest.fixture
def original():
    """The raw value of a path while the overlay is off."""
    assert not torch_overlay.is_enabled()
    return lambda path: patch.look_up(path)[2]


def snapshot(prefix="torch"):
    """By module and class: every attribute of it, of all that is imported under this name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == prefix and isinstance(module, types.ModuleType):
            found[name] = dict(vars(module))
            for value in list(vars(module).values()):
                if issubclass(type(value), type) and value.__module__ == name:
                    found[name, value.__qualname__] = dict(vars(value))
    return found


def differences(before, after):
    """Names whose object is another one, or that only one side has; what an import adds is no difference."""
    found = []
    for owner in before:
        old, new = before[owner], after[owner]
        found += [f"{owner}.{k}" for k in old.keys() | new.keys() if old.get(k, engine) is not new.get(k, engine)]
    return found


def test_importing_the_overlay_imports_no_torch():
    code = "import sys, torch_overlay, torch_overlay.overlay; print([m for m in sys.modules if m.startswith('torch.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    code = "import sys, torch_overlay; print(sorted(m for m in sys.modules if 'overlay' in m), 'typing' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['torch_overlay'] False\n"


def test_fingerprints_are_up_to_date():
    done = subprocess.run([sys.executable, "tools/fingerprint.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("release", versions.SUPPORTED)
def test_every_row_has_a_fingerprint_for_every_release_of_its_range(release):
    known = versions.fingerprints()[release]
    rows = [row for row in series.PATCHES if versions.parse(release).in_range(row)]
    missing = [
        row.target
        for row in rows
        if row.qualname and row.kind is not Kind.ADD and row.qualname not in known.get(row.module, {})
    ]
    assert rows and not missing, "run tools/fingerprint.py with this release"


def test_all_rows_apply_and_disable_leaves_no_trace():
    torch_overlay.enable(), torch_overlay.disable()  # imports the bodies, and what they import
    before, finders = snapshot(), list(sys.meta_path)
    status = torch_overlay.enable()
    during = snapshot()
    torch_overlay.disable()
    assert differences(before, snapshot()) == [] and sys.meta_path == finders
    assert {row.state for row in status.rows} <= {"on", "waiting", "stands down"}
    assert len(differences(before, during)) >= sum(row.kind is not Kind.HOOK and not row.is_swap for row in ROWS) // 2


def test_no_trace_is_left_when_late_modules_came_under_the_overlay():
    """In a process of its own: there the tensor modules aren't imported yet."""
    code = f"""
import importlib, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
import torch, torch_overlay, test_torch as t
from torch_overlay.patching import recognise as find
assert "torch.distributed.tensor" not in sys.modules
torch_overlay.enable()
[importlib.import_module(name) for name in (*t.WIDE[:6], "torch._dynamo")]
states = {{row.state for row in torch_overlay.status().rows}}
assert states <= {{"on", "stands down"}}, torch_overlay.status()
torch_overlay.disable()
ours = [(k, n) for k, names in t.snapshot().items() for n, v in names.items()
        if type(f := t.unwrapped(v)) is type(t.snapshot) and "torch_overlay" in str((f.__module__, f.__code__))]
assert ours == [], ours
bad = [row.target for row in t.ROWS if row.qualname and row.kind is not t.Kind.ADD
       and find.stranger(find.source_of(row.module), row.qualname, t.patch.look_up(row.target)[2])]
assert bad == [], bad
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("row", OUT_OF_RANGE, ids=row_id)
def test_the_overlay_stands_down(row, original):
    """A target that another row doesn't take on this release keeps torch's object."""
    if any(other.target == row.target for other in ROWS) or row.module not in sys.modules:
        pytest.skip("another row takes it on this release")
    before = original(row.target)
    with torch_overlay.enabled():
        assert patch.look_up(row.target)[2] is before


@pytest.mark.parametrize("row", [r for r in ROWS if r.kind is Kind.REPLACE], ids=row_id)
def test_a_body_takes_whatever_its_original_takes(row, original):
    importlib.import_module(row.module)
    ours, stock = (inspect.unwrap(unwrapped(value)) for value in (original(row.body), original(row.target)))
    if not (inspect.isfunction(ours) and inspect.isfunction(stock)):
        pytest.skip("no function")
    assert ours.__code__ is not stock.__code__, "the body is the original"
    theirs, mine = inspect.signature(stock).parameters, inspect.signature(ours).parameters
    rest = {p.kind for p in mine.values()}
    for name, parameter in theirs.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            assert parameter.kind in rest, f"{row.body} takes no {parameter}"
        elif name not in mine:
            assert parameter.VAR_KEYWORD in rest, f"{row.body} takes no {name}"
        else:
            assert (mine[name].default is mine[name].empty) <= (parameter.default is parameter.empty), name
    needed = [
        n for n, p in mine.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    assert set(needed) <= set(theirs), f"{row.body} needs {needed}"
    both = [n for n in theirs if n in mine and mine[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert both == [n for n in mine if n in both], "in the same order"


def unwrapped(value):
    """The function in a static method, class method or property."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if type(value) is property else value


@pytest.mark.parametrize("row", [r for r in ROWS if r.is_swap], ids=row_id)
def test_whoever_holds_a_function_of_torch_by_name_runs_ours(row, original):
    """The function stays the same object, so its copies needn't be known; only its code is another."""
    importlib.import_module(row.module)
    function, stock = original(row.target), original(row.target).__code__
    with torch_overlay.enabled():
        assert patch.look_up(row.target)[2] is function
        assert function.__code__ is not stock and function.__code__.co_filename.startswith(str(OURS))
    assert function.__code__ is stock


def test_a_changed_body_on_disk_is_refused_and_named(monkeypatch):
    """As on another build of the same release: the file's digest and one method's body are others."""
    row = next(row for row in ROWS if row.name == "__getitem__")
    table = {r: {m: dict(names) for m, names in modules.items()} for r, modules in versions.fingerprints().items()}
    table[RELEASE.compared_with][row.module] |= {"file": "another", row.qualname: "another"}
    monkeypatch.setattr(versions, "fingerprints", lambda: table)
    with pytest.raises(errors.ChangedTarget, match=rf"1 of .* targets.*\n.*{row.qualname}: .*another body"):
        torch_overlay.enable()
    with torch_overlay.enabled(strict=False) as status:
        left = {row.target for row in status.rows if row.state == "left out"}
    assert left == {r.target for r in ROWS if r is row or (row.unit and r.unit == row.unit)}


def test_every_body_is_recognised_without_the_files_digest(monkeypatch):
    """The slow path: as on a build of this release whose file differs elsewhere."""
    table = {
        r: {m: names | {"file": ""} for m, names in modules.items()} for r, modules in versions.fingerprints().items()
    }
    monkeypatch.setattr(versions, "fingerprints", lambda: table)
    with torch_overlay.enabled() as status:
        assert {row.state for row in status.rows} <= {"on", "waiting", "stands down"}


def test_disable_inside_a_mode_that_patches_meshes_is_refused():
    """LocalTensorMode puts its own methods on DeviceMesh, and on leaving puts back what it found there: maybe ours."""
    from torch.distributed._local_tensor import LocalTensorMode

    patched = {row.name for row in ROWS if row.owner == "DeviceMesh"}
    touched = {"get_coordinate", "get_rank", "get_local_rank"} & patched
    if not touched:
        pytest.skip("no row for a method that the mode replaces")
    torch_overlay.enable()
    with LocalTensorMode(2), pytest.raises(errors.ForeignPatch, match="DeviceMesh"):
        torch_overlay.disable()
    torch_overlay.disable()


def test_many_cycles_leak_nothing():
    """A hundred, and two thousand at night; an object that stays after one cycle in twenty is a leak."""
    cycles = 2 * settings.default.max_examples
    for _ in range(20):
        torch_overlay.enable(), torch_overlay.disable()
    gc.collect()
    before, threads = len(gc.get_objects()), threading.active_count()
    for _ in range(cycles):
        torch_overlay.enable(), torch_overlay.disable()
    gc.collect()
    assert len(gc.get_objects()) - before < cycles / 20
    assert threading.active_count() <= threads


def test_enable_is_quick(tmp_path):
    """The first call in a process that has imported torch, as a user who has run it before waits for it.

    It takes four to five times the processor time in which Python compiles torch's device_mesh.py, on any machine. The
    best of three is held, each in a fork of a process that has imported torch and nothing of ours.
    """
    code = f"""
import os, sys, time, torch, torch.distributed.device_mesh as mesh
sys.pycache_prefix, sys.dont_write_bytecode = {str(tmp_path)!r}, False
source = open(mesh.__file__).read()
for _ in range(4):
    if not os.fork():
        import torch_overlay
        start = time.process_time(); torch_overlay.enable(); end = time.process_time()
        compile(source, "device_mesh.py", "exec"); print((end - start) / (time.process_time() - end), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0"""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    ratios = [float(line) for line in done.stdout.split()[1:]]  # the first wrote the bytecode, and takes 20
    assert len(ratios) == 3 and min(ratios) < 8, (ratios, done.stderr)


def test_every_counter_is_there():
    """`count` passes over modules that aren't imported, so a wrong name would never be heard of."""
    from torch_overlay import report

    for counter in report.COUNTERS:
        module, _, name = counter.partition(":")
        assert getattr(importlib.import_module(module), name)(), counter
