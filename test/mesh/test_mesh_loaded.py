"""A mesh that is loaded before its world or its groups are there, and the groups that it finds. On the fake backend."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay
from mesh_harness import fake_world, needs_overlay
from torch_overlay.distributed._mesh.state import RANK_ATTRIBUTES
from torch_overlay.distributed._mesh.universe import private_groups
from torch_overlay.distributed.tensor._runner.at_hand import Site
from way import needs_package

pytestmark = needs_overlay


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def loaded():
    """Saved by rank 1, and there is no world; `as_rank_six` makes one."""
    with fake_world(1, 8):
        saved = pickle.dumps(grid())
    yield pickle.loads(saved)
    if dist.is_initialized():
        dist.destroy_process_group()


def as_rank_six() -> DeviceMesh:
    dist.init_process_group("fake", store=FakeStore(), rank=6, world_size=8)
    return grid()


ASKED = {
    "coordinate": lambda mesh, made: list(mesh.get_coordinate()) == [1, 2],
    "groups": lambda mesh, made: mesh._dim_group_names == made._dim_group_names,
    "redistribution": lambda mesh, made: (
        Site.of(mesh)[2:4] == Site.of(made)[2:4] == ((1, 2), (*made._dim_group_names,))
    ),
    "slice": lambda mesh, made: mesh["tp"].get_local_rank() == 2,
    "pickle": lambda mesh, made: list(pickle.loads(pickle.dumps(mesh)).get_coordinate()) == [1, 2],
    "copy": lambda mesh, made: list(copy.deepcopy(mesh).get_coordinate()) == [1, 2],
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("form", ["mesh", "view"])
def test_whatever_it_is_asked_first(loaded, asked, form):
    """A redistribution with the saver's coordinates and this rank's groups would send other pieces than its peers wait
    for: it ended the process."""
    assert list(loaded.get_coordinate()) == [0, 1], "as the file says, until there is a world"
    mesh = loaded if form == "mesh" else loaded.permute(("tp", "dp")).permute(("dp", "tp"))
    assert ASKED[asked](mesh, as_rank_six())


@needs_package
def test_disable_gives_it_back_as_it_was_saved(loaded):
    said = {name: getattr(loaded, name) for name in RANK_ATTRIBUTES}
    torch_overlay.disable()
    try:
        held = loaded.__dict__
        assert {name: held[name] for name in said} == said and "_of_saver" not in held
    finally:
        torch_overlay.enable()


@pytest.fixture
def loaded_first():
    """Loaded in a world in which its groups are made later."""
    with fake_world(1, 8):
        saved = pickle.dumps(grid())
    with fake_world(6, 8):
        yield pickle.loads(saved)


def test_it_has_its_groups_as_soon_as_they_are_there(loaded_first):
    """Whoever asks, and however: stock has the names of the process that saved, and warns."""
    assert not reduces(loaded_first)
    again = pickle.loads(pickle.dumps(loaded_first))
    made = grid()
    for mesh in (loaded_first, again, copy.deepcopy(loaded_first), loaded_first["dp", "tp"]):
        assert reduces(mesh) and mesh._dim_group_names == made._dim_group_names
        assert mesh.get_group("tp") is made.get_group("tp")
    assert "_of_saver" not in loaded_first.__dict__


def test_it_says_its_place_as_a_mesh_that_is_made_there(loaded_first):
    """In a list, where torch does: before 2.11."""
    place = loaded_first.get_coordinate()
    assert place == grid().get_coordinate() == loaded_first.get_coordinate()


def reduces(mesh: DeviceMesh) -> bool:
    """Whether a functional collective finds the group of the mesh's second axis."""
    try:
        funcol.all_reduce(torch.ones(1), "sum", (mesh, 1)).tolist()
    except RuntimeError as error:
        assert "no process group here has ranks [4, 5, 6, 7]" in str(error)
        return False
    return True


def from_elsewhere(mesh: DeviceMesh, **state) -> DeviceMesh:
    """As a process saved it whose groups have other names, and which made other meshes before."""
    state = {**mesh.__getstate__(), "_dim_group_names": ["elsewhere"] * mesh.ndim, **state}
    state["_universe"] = state["_universe"][0] + 9, state["_universe"][1]
    loaded = object.__new__(DeviceMesh)
    loaded.__setstate__(state)
    return loaded


def test_a_mesh_of_all_ranks_finds_the_default_group_or_those_of_a_mesh_that_is_as_private():
    with fake_world(5, 8):
        assert from_elsewhere(init_device_mesh("cpu", (8,))).get_group() is dist.group.WORLD
        with private_groups():
            mesh = init_device_mesh("cpu", (8,))
        assert from_elsewhere(mesh).get_group() is mesh.get_group() is not dist.group.WORLD
        with pytest.raises(RuntimeError, match="no process group here has the ranks"):
            from_elsewhere(mesh, _universe=(1, "private, and not here")).get_group()


def test_a_group_that_no_mesh_has_is_taken_if_it_was_made_for_one():
    with fake_world(5, 8):
        with private_groups():
            loaded = from_elsewhere(grid(), _universe=(1, None))
        dist.new_group([4, 5, 6, 7], group_desc="mine")
        with pytest.raises(RuntimeError, match="no process group here has the ranks"):
            loaded.get_group(1)
        theirs = dist.new_group([4, 5, 6, 7], group_desc="mesh_tp")
        assert loaded.get_group(1) is theirs
