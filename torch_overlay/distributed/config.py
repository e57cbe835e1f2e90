"""The switches that these bodies read. Upstream they are entries of
torch.distributed.config, off by default; here `enable` sets them, and what isn't ours
is torch's own."""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

mesh_share_groups: str = "names"
mesh_create_groups: str = "members"
mesh_joint_groups: str = "whole"
mesh_check: bool = False
plan_redistribution: bool = True

# Which release this code belongs to; ranks compare it. Whoever turns the code on says
# so.
build: str = ""


_lock = threading.Lock()
_found: dict[str, Any] = {}  # what blocks of `patch` that are open found
_changes: list[dict[str, Any]] = []  # and what they changed


@contextlib.contextmanager
def patch(**changes: Any) -> Iterator[None]:
    """Other choices for one block of code, for tests that run in both homes. Torch's
    function of this name changes them for one thread; this one for all, and what blocks
    in several threads found is back when the last of them ends."""
    with _lock:
        for name in changes:
            _found.setdefault(name, globals()[name])
        _changes.append(changes)
        _put()
    try:
        yield
    finally:
        with _lock:
            del _changes[next(i for i, each in enumerate(_changes) if each is changes)]
            _put()
            if not _changes:
                _found.clear()


def _put() -> None:
    globals().update(_found)
    for changes in _changes:
        globals().update(changes)


def __getattr__(name: str) -> Any:
    if name != "use_torchcomms":
        raise AttributeError(f"module {__name__} has no switch {name}")
    try:
        return getattr(importlib.import_module("torch.distributed.config"), name, False)
    except ImportError:
        return False  # torch doesn't have it yet
