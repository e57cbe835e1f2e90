"""Which group a loaded mesh finds where the universe that it was saved from isn't here. On the fake backend."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mesh_harness import fake_world, needs_overlay
from torch_overlay.distributed._groups.universe import private_groups

pytestmark = needs_overlay


@pytest.fixture(autouse=True)
def world():
    """Rank 5 of 8."""
    with fake_world(5, 8):
        yield


def from_elsewhere(mesh: DeviceMesh, **state) -> DeviceMesh:
    """As a process saved it whose groups have other names, and which made other meshes before."""
    state = {**mesh.__getstate__(), "_dim_group_names": ["elsewhere"] * mesh.ndim, **state}
    state["_universe"] = state["_universe"][0] + 9, state["_universe"][1]
    loaded = object.__new__(DeviceMesh)
    loaded.__setstate__(state)
    return loaded


def finds_none(mesh: DeviceMesh) -> bool:
    with pytest.raises(RuntimeError, match="no process group here has the ranks"):
        mesh.get_group(mesh.ndim - 1)
    return True


def test_of_all_ranks_it_is_the_default_group():
    mesh = init_device_mesh("cpu", (8,))
    assert from_elsewhere(mesh).get_group() is dist.group.WORLD


def test_a_private_mesh_finds_the_groups_of_one_that_is_as_private():
    with private_groups():
        mesh = init_device_mesh("cpu", (8,))
    assert from_elsewhere(mesh).get_group() is mesh.get_group() is not dist.group.WORLD
    assert finds_none(from_elsewhere(mesh, _universe=(1, "private, and not here")))


@pytest.mark.parametrize("text, found", [("mesh_tp", True), ("mine", False)])
def test_a_group_that_no_mesh_has_is_taken_if_it_was_made_for_one(text, found):
    with private_groups():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    theirs = dist.new_group([4, 5, 6, 7], group_desc=text)
    loaded = from_elsewhere(mesh, _universe=(1, None))
    assert loaded.get_group(1) is theirs if found else finds_none(loaded)
