"""A better `torch.distributed.device_mesh` and DTensor `redistribute` for a released PyTorch, in place.

``torch_overlay.enable()`` turns it on and ``torch_overlay.disable()`` leaves torch as it was. Importing this imports no
torch; ``python -m torch_overlay run script.py`` runs a program that doesn't know of the overlay under it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not typing's: every Python process under `run` imports this file, and should pay nothing
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any

    from .distributed._settings import Settings
    from .report import Status

__version__ = "0.1.0"
__all__ = [
    "disable",
    "draw",
    "enable",
    "enabled",
    "explain",
    "is_enabled",
    "options",
    "parallel_dims",
    "prepare",
    "private_groups",
    "status",
]


def enable(*, strict: bool | None = None, **options: Any) -> Status:
    """Patch torch in this process, and return what was done: one line a patch when printed.

    Every target is recognised before the first is set. An unknown torch release or a target with another body is
    refused (OverlayError), and torch is untouched; ``strict=False`` applies the rows that are recognised and leaves
    the others out. Options (`options` lists them) come from here, else from ``TORCH_OVERLAY_<NAME>``, else they are the
    defaults. Enabling twice is enabling once: the second call only changes the options that it names.
    """
    from . import overlay

    return overlay.enable(strict, **options)


def disable(*, force: bool = False) -> None:
    """Put back every object of torch's that was replaced, the same by identity, and remove every one that was added.

    If somebody patched one of these after `enable` (a mode that is still on, another library), ForeignPatch names it
    and nothing changes, since their patch may call ours or bring it back; ``force=True`` puts torch's own there
    nevertheless. Meshes and groups that were made under the overlay keep working.
    """
    from . import overlay

    overlay.disable(force)


def enabled(*, strict: bool | None = None, **options: Any) -> AbstractContextManager[Status]:
    """The overlay for a block of code, then as before: off if it was off, else on with the options that it had.

    The overlay belongs to the process, not to a thread. Of blocks in several threads that overlap, the last one to end
    puts back what was there before the first.
    """
    from . import overlay

    return overlay.enabled(strict, **options)


def is_enabled() -> bool:
    """Whether the overlay is on in this process."""
    from . import overlay

    return overlay.is_enabled()


def options() -> Settings:
    """The options in force, a frozen value; while the overlay is off, those that `enable` would start from.

    >>> import torch_overlay
    >>> torch_overlay.options().flatten
    'whole'
    """
    from . import overlay

    return overlay.options()


def status() -> Status:
    """What the overlay does in this process: each patch, what was counted, the options. Print it."""
    from . import overlay

    return overlay.status()


def __getattr__(name: str) -> Any:
    """What needs torch, imported when it is first asked for."""
    import importlib

    if name == "private_groups":
        return importlib.import_module(f"{__name__}.distributed._universe").private_groups
    if name == "prepare":
        return importlib.import_module(f"{__name__}.distributed._mesh_groups").prepare
    if name in ("draw", "explain", "parallel_dims"):  # rooms; explain can be called, too
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
