"""The call after an import: when it comes, and what the import looks like from outside."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from torch_overlay.patching.import_hook import AfterImport


@pytest.fixture
def arrived(tree):
    """Names as they arrive, while the hook waits for two modules of the fake library."""
    names = []
    hook = AfterImport(["fakelib.late.inner", "fakelib.late.friend"], names.extend)
    hook.install()
    yield names
    hook.remove()


def test_by_then_the_package_is_whole(tree):
    whole = []
    hook = AfterImport(["fakelib.late.inner"], lambda _: whole.append(hasattr(sys.modules["fakelib.late"], "friend")))
    hook.install()
    importlib.import_module("fakelib.late")
    hook.remove()
    assert whole == [True]


def test_a_hook_that_is_removed_while_its_module_runs_is_silent(arrived, tree, monkeypatch):
    hook = AfterImport(["fakelib.user"], arrived.extend)
    hook.install()
    monkeypatch.setattr(sys, "remove_hook", hook.remove, raising=False)
    tree.edit("fakelib.user", "def", "import sys; sys.remove_hook()\ndef")
    importlib.import_module("fakelib")
    assert arrived == []


def test_the_call_comes_once_when_the_package_is_there(arrived):
    importlib.import_module("fakelib")
    assert arrived == []
    importlib.import_module("fakelib.late.inner")
    importlib.import_module("fakelib.late.inner")
    assert arrived == ["fakelib.late.inner", "fakelib.late.friend"]


def test_the_module_looks_as_if_nobody_had_watched(arrived):
    module = importlib.import_module("fakelib.late.inner")
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert importlib.util.find_spec("fakelib.late.inner").loader.get_source("fakelib.late.inner").startswith("from")
    assert importlib.reload(module) is module


def test_an_import_that_fails_tells_nothing_and_may_be_tried_again(arrived, tree):
    tree.edit("fakelib.late.friend", "from", "raise KeyError('x')\nfrom")
    with pytest.raises(KeyError):
        importlib.import_module("fakelib.late")
    tree.edit("fakelib.late.friend", "raise KeyError('x')\n", "")
    for name in [name for name in sys.modules if name.startswith("fakelib.late")]:
        del sys.modules[name]
    arrived.clear()
    importlib.invalidate_caches()
    importlib.import_module("fakelib.late")
    assert sorted(set(arrived)) == ["fakelib.late.friend", "fakelib.late.inner"]


def test_what_the_call_raises_comes_out_of_the_import(tree):
    def refuse(names):
        raise RuntimeError(f"not {names}")

    hook = AfterImport(["fakelib.user"], refuse)
    hook.install()
    with pytest.raises(RuntimeError, match=r"not \['fakelib.user'\]"):
        importlib.import_module("fakelib")
    hook.remove()


@pytest.mark.parametrize("first", ["torch.distributed.tensor", "torch.distributed.checkpoint.state_dict"])
def test_torch_is_imported_in_any_order_after_enable(first):
    """A body that imports a module for which a patch waits has it patched while the body itself is half imported."""
    code = f"import torch_overlay; torch_overlay.enable(); import {first}; import torch.distributed.fsdp"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
