"""The rows of the series against the files of the house, without torch: each body is there, where its target says."""

import dataclasses

import pytest

import house
from torch_overlay.patching.patch import Kind, Patch
from torch_overlay.patching.recognise import definitions
from torch_overlay.series import PATCHES

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


@pytest.mark.parametrize(
    "change, is_missing, is_misplaced",
    [
        ({}, False, False),
        ({"body": ROW.body + "s"}, True, True),
        ({"body": "torch_overlay.distributed.device_meshes:_DeviceMesh.get_group"}, True, True),
        ({"body": "torch_overlay.overlay:disable"}, False, True),
        (
            {"kind": Kind.HOOK, "body": "torch_overlay.overlay:enable", "undo": "torch_overlay.overlay:disable"},
            False,
            False,
        ),
        (
            {"kind": Kind.HOOK, "body": "torch_overlay.overlay:enable", "undo": "torch_overlay.overlay:gone"},
            True,
            False,
        ),
    ],
)
def test_a_wrong_row_is_caught(change, is_missing, is_misplaced):
    row = dataclasses.replace(ROW, **change)
    assert (bool(missing(row)), bool(misplaced(row))) == (is_missing, is_misplaced)
