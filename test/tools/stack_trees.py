"""A PyTorch tree of the few files that the stack reads, for tests that render onto it."""

import pathlib
import shutil
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

pytest.importorskip("ruff", reason="the stack is formatted with ruff: pip install -e '.[dev]'")

from stack.render import file_of  # noqa: E402
from stack.tree import OLDEST  # noqa: E402

from torch_overlay import versions  # noqa: E402
from torch_overlay.patching.patch import Kind  # noqa: E402
from torch_overlay.series import PATCHES as ROWS  # noqa: E402

if versions.running().number < OLDEST:
    pytest.skip("the stack is rendered onto torch 2.13 and later", allow_module_level=True)

INSTALLED = pathlib.Path(torch.__file__).parent
# Files of torch that the stack reads; a tree of these alone is quick to copy and to commit.
HERE = [row for row in ROWS if row.kind is not Kind.HOOK and versions.running().in_range(row)]
TOUCHED = sorted({f"torch/distributed/{file_of(row.module)}" for row in HERE})
CONFIG = "torch/distributed/config.py"
LAYOUTS = "torch/distributed/_mesh_layout.py"
STATES = "torch/distributed/_state_dict_utils.py"  # a hook of the overlay, some lines upstream
PACKAGES = ["torch/distributed/__init__.py", "torch/distributed/tensor/__init__.py"]


def small_tree(folder: pathlib.Path) -> pathlib.Path:
    for path in [*TOUCHED, *PACKAGES, CONFIG, LAYOUTS, STATES, "torch/version.py"]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED.parent / path, folder / path)
    return folder
