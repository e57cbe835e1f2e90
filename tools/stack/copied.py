"""A copy of an installed torch that can be patched: its files under ``torch/distributed``, and links elsewhere."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil

from .message import StackError

COPIED = "distributed"


def installed_torch() -> pathlib.Path:
    """The folder of the torch that this Python would import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise StackError("torch isn't installed for this Python, so there is nothing to copy")
    return pathlib.Path(spec.origin).parent


def copy_torch(installed: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Make ``folder/torch``; a Python with the folder on its path imports it in place of the installed one.

    Args:
        installed: the ``torch`` folder of an environment.

    Returns:
        The folder, to render onto.
    """
    target = folder / "torch"
    if target.exists():
        raise StackError(f"{target} is there already; give a folder without torch")
    target.mkdir(parents=True)
    for entry in sorted(installed.iterdir()):
        if entry.name == "__pycache__":
            continue
        if entry.name == COPIED:
            shutil.copytree(entry, target / COPIED)
        else:
            (target / entry.name).symlink_to(entry.resolve())
    return folder
