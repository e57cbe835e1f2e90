"""The settings of the mesh and of redistribution.

`enable` sets them, and the code under ``distributed/`` reads them. Upstream they are
entries of torch.distributed.config, and off by default. ``use_torchcomms`` is torch's
setting, and is read from there.
"""

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

# The release of torch and the version of this package, by their names. Ranks compare
# them, since ranks with different versions would plan differently. `enable` sets them.
versions: dict[str, str] = {}
# The option by which people set each setting, for messages. `enable` sets it.
option_names: dict[str, str] = {}


def as_options(settings: dict[str, Any]) -> dict[str, Any]:
    """The versions, and the settings by the names of the options."""
    options = {
        option_names[s]: value for s, value in settings.items() if s in option_names
    }
    return versions | options


_lock = threading.Lock()
# The values from before the first open block of `patch`, and the changes of each block.
_before_blocks: dict[str, Any] = {}
_changes: list[dict[str, Any]] = []


@contextlib.contextmanager
def patch(**changes: Any) -> Iterator[None]:
    """Other settings for one block of code, in all threads, for tests that run here and
    upstream (there in one thread). What was before comes back when the last block
    ends."""
    with _lock:
        for name in changes:
            _before_blocks.setdefault(name, globals()[name])
        _changes.append(changes)
        _apply()
    try:
        yield
    finally:
        with _lock:
            # By identity: a block in another thread may have made equal changes.
            del _changes[next(i for i, c in enumerate(_changes) if c is changes)]
            _apply()
            if not _changes:
                _before_blocks.clear()


def _apply() -> None:
    """Set the values from before the blocks, then changes of open blocks in order."""
    globals().update(_before_blocks)
    for changes in _changes:
        globals().update(changes)


def __getattr__(name: str) -> Any:
    """``use_torchcomms``, as torch.distributed.config has it; False where it hasn't."""
    if name != "use_torchcomms":
        raise AttributeError(f"module {__name__} has no setting {name}")
    try:
        return getattr(importlib.import_module("torch.distributed.config"), name, False)
    except ImportError:
        return False  # torch doesn't have it yet
