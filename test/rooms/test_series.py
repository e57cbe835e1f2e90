"""The rows of the series against the files of the house, without torch: each body is there, where its target says."""

import dataclasses

import pytest

import house
from torch_overlay.patching.patch import Kind, Patch
from torch_overlay.patching.recognise import definitions
from torch_overlay.series import MODULES, PATCHES, TABLE, _patches

SOURCES = {source.module: source for source in house.sources("torch_overlay")}
ROW = Patch(
    "torch.distributed.device_mesh:DeviceMesh.get_group", "torch_overlay.distributed.device_mesh:_DeviceMesh.get_group"
)


def missing(patch):
    """The paths of a row that no definition in the house answers to."""

    def defined(path):
        module, _, qualname = path.partition(":")
        return module in SOURCES and any(definitions(SOURCES[module].tree, qualname))

    return [path for path in (patch.body, patch.undo) if path and not defined(path)]


def misplaced(patch):
    """What a row that upstream takes should have for a body's module and name: those of its target; None if it has.

    A hook, or what only agrees with the release that runs, is nothing that an upstream commit needs, so it may live
    elsewhere.
    """
    module, _, qualname = patch.body.partition(":")
    home = patch.module.replace("torch.", f"{house.PACKAGE}.", 1)
    at_home = module == home or module.startswith(f"{house.PACKAGE}.compat.")
    right = at_home and qualname.rpartition(".")[2] == patch.name
    return None if right or patch.kind is Kind.HOOK else (home, patch.name)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.target}-{patch.kind.name}")
def test_body_is_there_and_mirrors_its_target(patch):
    assert not missing(patch)
    assert not misplaced(patch)


def test_each_line_of_the_table_is_a_patch():
    lines = [line for line in TABLE.splitlines() if line and not line.startswith(("#", "["))]
    assert len(lines) == len(PATCHES) == len(set(PATCHES))
    assert {row.module for row in PATCHES} == {*MODULES.values()}


def test_a_row_says_what_its_line_says():
    ours, compat, hook = _patches(
        """
[one]
replace >=2.12 #1 mesh:DeviceMesh.get_group ours
# why
add <2.12 - layout:_FlatLayout compat._mesh_layout:*

[two]
hook all - mesh hooks:on/off
"""
    )
    assert ours == dataclasses.replace(ROW, releases=">=2.12", ends="pytorch/pytorch#1", unit="one")
    assert compat.target == "torch.distributed._mesh_layout:_FlatLayout"
    assert compat.body == "torch_overlay.compat._mesh_layout:_FlatLayout"
    assert (compat.kind, compat.releases, compat.ends, compat.unit) == (Kind.ADD, "<2.12", None, "one")
    assert (hook.target, hook.releases, hook.unit) == ("torch.distributed.device_mesh", "", "two")
    assert (hook.body, hook.undo) == ("torch_overlay.hooks:on", "torch_overlay.hooks:off")
