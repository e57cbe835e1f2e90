"""Before torch 2.10 a mesh is a tensor of ranks, which `_mesh_resources` finds views of: both under the overlay."""

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_overlay
from mesh_harness import fake_world, group_ranks, needs_overlay
from torch_overlay.distributed._groups.universe import universe_of
from torch_overlay.distributed._mesh.state import shared_state, view_of
from way import TENSOR_MESHES

tensors = pytest.mark.skipif(not TENSOR_MESHES, reason="since 2.10 a mesh has a layout")


@pytest.fixture(autouse=True)
def world():
    """Rank 5 of 16."""
    with fake_world(5, 16):
        yield


def cube():
    return init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("a", "b", "c"))


@needs_overlay  # before 2.10 stock compares a name with the letters of others
def test_a_flattened_view_may_have_a_letter_of_another_s_name():
    mesh = cube()
    first, second = mesh["a", "b"]._flatten("xy"), mesh["b", "c"]._flatten("x")
    assert (first.size(), second.size()) == (8, 8) and mesh["x"] == second != first


@tensors
@needs_overlay
def test_resources_answer_from_the_shared_state():
    resources, mesh = device_mesh._mesh_resources, cube()
    piece, flat = mesh["b"], resources.create_flatten_mesh(mesh["a", "c"], "ac")
    assert flat is mesh._flatten_mapping["ac"] and flat.mesh.tolist() == [4, 5, 12, 13]
    assert resources.get_root_mesh(piece) is resources.get_root_mesh(flat) is resources.get_root_mesh(mesh) is mesh
    assert (resources.get_root_mesh_dim(piece), resources.get_mesh_dim_by_name(mesh, "c")) == (1, 2)
    assert resources._get_slice_mesh_dims(mesh, ("b",)) == [(1,)]
    assert resources._get_slice_mesh_dims(mesh, ("ac",)) == [(0, 2)]
    assert resources.create_sub_mesh(mesh, ("b", "c"), [(1,), (2,)]) == mesh["b", "c"]
    assert [part.mesh.tolist() for part in resources._get_all_submeshes(mesh, "c")][:2] == [[0, 1], [2, 3]]
    children, flattened = resources.child_to_root_mapping, resources.root_to_flatten_mapping
    assert children[piece] is mesh and children.get(mesh) is None and piece in list(children)
    assert flattened[mesh] == {"ac": flat} and list(flattened) == [mesh] and flattened.get(piece) is None
    assert resources.flatten_name_to_root_dims[mesh] == {"ac": (0, 2)} and len(resources.flatten_name_to_root_dims) == 1
    assert flat._flatten_mesh_list == (4, 5, 12, 13)
    flattened.setdefault(mesh, {})["mine"] = piece  # as libraries write it
    assert mesh["mine"].mesh.tolist() == piece.mesh.tolist()


@tensors
@needs_overlay
def test_axes_of_one_rank_are_told_by_the_name_that_joins_them():
    mesh = init_device_mesh("cpu", (1, 1, 16), mesh_dim_names=("a", "b", "c"))
    views = [mesh["a", "b"]._flatten(), mesh["b", "c"]._flatten("bc")]
    assert device_mesh._mesh_resources.flatten_name_to_root_dims[mesh] == {"a_b": (0, 1), "bc": (2,)}
    assert [view.size() for view in views] == [1, 16]


@tensors
@needs_overlay
def test_a_slice_of_a_cut_axis_is_found_beside_the_others():
    """FSDP2 slices the root of its slice again: it must know the names, and be the same for all axes."""
    find = device_mesh._mesh_resources.get_root_mesh
    cut = init_device_mesh("cpu", (16,), mesh_dim_names=("world",))._unflatten(0, (2, 4, 2), ("pp", "dp", "tp"))
    flat = cut["pp", "dp"]._flatten("ppdp")
    assert find(cut["dp"]) == find(cut["tp"]) == find(flat) == cut
    assert find(cut["dp"])["dp", "tp"].shape == (4, 2) and cut["dp"]._get_root_mesh().shape == (16,)


@tensors
@needs_overlay
def test_what_resources_were_told_of_an_axis_holds():
    resources = device_mesh._mesh_resources
    resources._set_mesh_dim_group_options(1, "fake")
    try:
        mesh = init_device_mesh("cpu", (2, 8))
        assert universe_of(shared_state(mesh)).overrides[mesh._dim_group_names[1]] == ("fake", None)
        with pytest.raises(RuntimeError, match="Dimension 1 present both"):
            init_device_mesh("cpu", (2, 8), backend_override={1: "fake"})
    finally:
        resources.mesh_dim_group_options.clear()


@tensors
@needs_overlay
def test_meshes_that_torch_made_become_views_and_go_back():
    torch_overlay.disable()
    sizes, names = (2, 4, 2), ("p", "q", "r")  # of no other test: torch knows a mesh by its value, in all worlds
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    pair, flat = mesh["q", "r"], mesh["p", "q"]._flatten("pq")
    single, alone = pair["r"], DeviceMesh("cpu", [[5, 1], [9, 13]])
    held = {name: sorted(vars(each)) for name, each in (("root", mesh), ("slice", pair))}
    torch_overlay.enable()
    assert pair._get_root_mesh() is single._get_root_mesh() is flat._get_root_mesh() is mesh
    assert [str(view_of(each).layout.axes) for each in (pair, flat)] == ["(_FlatLayout(4:2), _FlatLayout(2:1))"] + [
        "(_FlatLayout(8:2),)"
    ]
    assert mesh["pq"] == flat and alone._get_root_mesh() is alone and alone.get_coordinate() == [0, 0]
    made, kept = mesh["p", "r"]._flatten("pr"), init_device_mesh("cpu", sizes, mesh_dim_names=names)
    assert made.mesh.tolist() == [4, 5, 12, 13] and kept == mesh and hash(kept) == hash(mesh)
    torch_overlay.disable()
    try:
        assert sorted({*vars(mesh)} - {"_hash"}) == sorted({*held["root"], "_universe"} - {"_hash"})
        assert sorted({*vars(pair)} - {"_hash"}) == sorted({*held["slice"]} - {"_hash"})
        assert device_mesh._mesh_resources.get_root_mesh(made) == mesh and mesh["pq", "r"].shape == (8, 2)
        assert group_ranks(mesh, "q") == (1, 3, 5, 7) and isinstance(made.mesh, torch.Tensor)
    finally:
        torch_overlay.enable()


@tensors
@needs_overlay
def test_a_mesh_comes_back_as_the_root_that_it_was():
    """With its universe, though torch's dicts, which know a mesh by its value, have an equal slice of another."""
    names = ("over", "left", "right")
    wide, mesh = init_device_mesh("cpu", (1, 2, 8), mesh_dim_names=names), init_device_mesh("cpu", (2, 8))
    named = init_device_mesh("cpu", (2, 8), mesh_dim_names=names[1:])
    piece, cut = wide["left", "right"], init_device_mesh("cpu", (16,))._unflatten(0, (4, 4), ("outer", "inner"))
    numbers = [universe_of(shared_state(each)).number for each in (wide, mesh, named, cut)]
    torch_overlay.disable()
    torch_overlay.enable()
    assert piece == named and piece._get_root_mesh() is wide and named._get_root_mesh() is named
    assert [universe_of(shared_state(each)).number for each in (wide, mesh, named, cut)] == numbers


class Own(DeviceMesh):
    """Sets what torch's __init__ would, and doesn't call it."""

    def __init__(self, ranks):
        self.device_type, self.mesh, self.mesh_dim_names = "cpu", ranks, ("x", "y")
        self._flatten_mesh_list, self._thread_id = tuple(ranks.flatten().tolist()), None
        self._coordinate_on_dim, self._dim_group_names = [0, 1], ["0", "0"]


@tensors
def test_a_subclass_may_set_what_torch_sets():
    mesh = Own(torch.tensor([[4, 5], [6, 7]], dtype=torch.int))
    assert (mesh.shape, mesh.mesh.tolist(), mesh.mesh_dim_names) == ((2, 2), [[4, 5], [6, 7]], ("x", "y"))
    mesh.mesh_dim_names = ("p", "q")
    assert mesh["q"].mesh.tolist() == [4, 5] and hash(mesh) == hash(mesh) and mesh == mesh
