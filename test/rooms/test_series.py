"""The rows of the series against the package, without torch: a row for another release has its body, too."""

import pathlib

import pytest

import torch_overlay
from torch_overlay.patching.recognise import Source, definitions
from torch_overlay.series import PATCHES, TABLE

FOLDER = pathlib.Path(torch_overlay.__file__).parents[1]


def is_defined(path: str) -> bool:
    module, _, qualname = path.partition(":")
    file = FOLDER.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return file.is_file() and any(definitions(Source(module, str(file)).tree, qualname))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.target}-{patch.kind.name}")
def test_the_body_of_a_row_is_there(patch):
    assert [path for path in (patch.body, patch.undo) if path and not is_defined(path)] == []


def test_each_line_of_the_table_is_a_patch():
    lines = [line for line in TABLE.splitlines() if line and not line.startswith(("#", "["))]
    assert len(lines) == len(PATCHES) == len(set(PATCHES))
