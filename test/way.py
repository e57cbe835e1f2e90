"""In which way the suite runs, by ``TORCH_OVERLAY_TEST``; the one place that says what "on" means for a test.

overlay   the default: torch as released, and the overlay on around each test
stock     torch as released: what a test says of stock must hold there; those that need the overlay are skipped, and
          those that turn it on themselves as they do
patched   a torch that carries our code itself, as the stack renders it: what isn't on by default is turned on around
          each test, and then tests see what they see under the overlay. Such a torch comes first on the path.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

import pytest

from torch_overlay import choices
from torch_overlay.testing import left_as_found

WAYS = ("overlay", "stock", "patched")
WAY = os.environ.get("TORCH_OVERLAY_TEST", "overlay")
if WAY not in WAYS:
    raise ValueError(f"TORCH_OVERLAY_TEST is one of {', '.join(WAYS)}, not {WAY!r}")
STOCK = WAY == "stock"


def _gives_back(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda given: given


class _Carried(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """On a torch that carries our code, `torch_overlay.distributed.x` is `torch.distributed.x`: one set of tests."""

    def find_spec(self, name, path=None, target=None):
        ours = name == "torch_overlay.distributed" or name.startswith("torch_overlay.distributed.")
        return importlib.machinery.ModuleSpec(name, self) if ours else None

    def create_module(self, spec):
        if spec.name.endswith("._torch"):  # torch needs no door to its own layouts
            self.spec, opened = spec, types.ModuleType(spec.name)
            opened.__getattr__ = _gives_back
            return opened
        self.carried = importlib.import_module(spec.name.replace("torch_overlay", "torch", 1))
        if type(self.carried) is not types.ModuleType:  # the module of settings takes no other attribute
            self.carried, settings = types.ModuleType(spec.name), self.carried
            self.carried.patch = settings.patch
        self.spec = self.carried.__spec__
        return self.carried

    def exec_module(self, module):
        module.__spec__ = self.spec or module.__spec__  # the import put its own there


def carries(file):
    """Whether torch has this file of ours, as ``_mesh.compare``: the first patches don't bring them all."""
    folder = file.rpartition(".")[0]
    return (not folder or carries(folder)) and importlib.util.find_spec(f"torch.distributed.{file}") is not None


# "plan" is no option of the overlay, where plans are on.
SETTINGS = {**choices.SETTINGS, "plan": "plan_redistribution"}
# What the overlay has on by default, and torch from `planned-by-default` on; and torch before.
ON = {"share_groups": "names", "flatten": "whole", "plan": True}
OFF = {"share_groups": "off", "flatten": "existing", "plan": False}


def set_options(**options):
    """The settings of the running code, as ``enable()`` would set them; what they were before.

    Those that come with a later patch of the stack aren't there yet.
    """
    config = importlib.import_module("torch.distributed.config")
    there = {name: setting for name, setting in SETTINGS.items() if hasattr(config, setting)}
    before = {name: getattr(config, setting) for name, setting in there.items()}
    for name in there.keys() & options:
        value = options[name]
        setattr(config, there[name], choices.settings({name: value}).get(there[name], value))
    return before


def _carry() -> None:
    """On such a torch enable(), disable() and the options set torch's settings."""
    if not carries("_mesh.universe"):
        return
    face = importlib.import_module("torch_overlay.overlay")
    settings = importlib.import_module("torch_overlay.distributed._mesh.universe")
    face.enable = lambda strict=None, **options: set_options(**ON | options)
    face.disable = lambda force=False: set_options(**OFF)
    face.is_enabled = lambda: True
    face.options = settings.get_settings
    face.enabled = lambda strict=None, **options: overlay(**options)


def _skip(*args, **options):
    pytest.skip("what only the overlay does")


if STOCK:
    face = importlib.import_module("torch_overlay.overlay")
    face.enable = face.enabled = _skip
if WAY == "patched":
    sys.meta_path.insert(0, _Carried())
    _carry()

# For what stock can't do, and for what asks the package itself (status(), options, enable and disable).
needs_overlay = pytest.mark.skipif(STOCK, reason="what only the overlay does")
needs_package = pytest.mark.skipif(WAY != "overlay", reason="what the package torch_overlay does, beside its bodies")


def inherits_timeouts():
    """Whether groups of meshes take the default group's timeout: ours do, and so does stock with the patch for that."""
    return not STOCK or hasattr(importlib.import_module("torch.distributed.distributed_c10d"), "_timeout_of")


def as_beside_gloo(monkeypatch):
    """The fake group is taken for one of gloo's, which needs no element where there is nothing to send."""
    if WAY == "overlay":
        monkeypatch.setattr("torch_overlay.distributed._torch.get_backend", lambda group: "gloo")


@contextlib.contextmanager
def overlay(**options):
    """Our bodies in place inside, with these options, and torch as it was found after; on stock runs nothing is."""
    if WAY == "overlay":
        with left_as_found(**options):
            yield
    elif WAY == "patched":
        before = set_options(**ON | options)
        try:
            yield
        finally:
            set_options(**before)
    else:
        yield


class InThisWay:
    """Before one of the mixins of ``torch_overlay.testing``: its ranks do as the whole suite does."""

    overlay_options = {}

    @classmethod
    def overlay(cls):
        return overlay(**cls.overlay_options)
