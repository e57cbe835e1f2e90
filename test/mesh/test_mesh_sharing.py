"""What shares a group and what does not; on the fake backend, where only the bookkeeping is real."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay
from mesh_harness import fake_world, joint_group, needs_overlay, open_groups, overlay
from torch_overlay.distributed._mesh import state
from torch_overlay.distributed._mesh.groups import Request, _default_serves, _describe
from torch_overlay.distributed._mesh.rank_map import RankMap, View
from torch_overlay.distributed._mesh.state import shared_state, view_of
from torch_overlay.distributed._mesh.universe import current_world, find_group, universe_of
from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed.tensor._runner.at_hand import joint_axes
from way import needs_package

pytestmark = needs_overlay


@pytest.fixture(autouse=True)
def world():
    with fake_world(1, 8):
        yield


def grid(*names: str, **how) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=names or ("dp", "tp"), **how)


FORMS = {
    "slice": lambda mesh: mesh["dp"],
    "flatten": lambda mesh: mesh._flatten("all"),
    "unflatten": lambda mesh: mesh._unflatten("tp", (2, 2), ("x", "y")),
    "permute": lambda mesh: mesh.permute(("tp", "dp")),
    "concatenate": lambda mesh: DeviceMesh._concatenate([mesh["dp"], mesh["tp"]]),
    "submesh_at": lambda mesh: mesh.submesh_at("tp", at={"dp": 0}),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
}


@pytest.mark.parametrize("form", FORMS)
def test_privacy_is_kept_by_views_copies_and_pickles(form):
    """Their value tells them from the same of a mesh that isn't private, and what they make is their own."""
    public = FORMS[form](grid())
    with torch_overlay.private_groups():
        mesh, other = grid(), grid()
    view = FORMS[form](mesh)
    assert view != public and hash(view) != hash(public) and view._stable_hash() != public._stable_hash()
    assert view != FORMS[form](other), "two private meshes aren't one"
    assert view == FORMS[form](mesh)
    assert dist.group.WORLD not in view.get_all_groups() + view._flatten("flat").get_all_groups()
    plain = [*grid().get_all_groups(), *other.get_all_groups()]
    assert not set(map(id, view.get_all_groups())) & set(map(id, plain))


@needs_package
def test_an_unflattened_view_made_in_a_private_block_uses_no_joint_group_of_its_mesh():
    """Nor do its slices and copies; another thread may redistribute over the whole of another view."""
    root = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    plain = root._unflatten(0, (2, 2, 2), ("a", "b", "c"))
    with torch_overlay.private_groups():
        own = root._unflatten(0, (2, 2, 2), ("a", "b", "c"))
    assert joint_axes(plain) and not set(own._dim_group_names) & set(plain._dim_group_names)
    for view in (own, own["a", "b"], copy.deepcopy(own), copy.copy(own), pickle.loads(pickle.dumps(own))):
        assert not joint_axes(view)
    with pytest.raises(RuntimeError, match="prepare makes groups that all views of a mesh share"):
        torch_overlay.prepare(own)


def test_ranks_compare_whether_a_view_is_made_in_a_private_block():
    """Else the rank that is alone in the block would wait for the others."""
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    asked = mesh, view_of(mesh).layout, ("world",), [(None, None)]
    outside = _describe(*asked)
    with torch_overlay.private_groups():
        assert _describe(*asked) == f"{outside}, private"


@needs_package
def test_an_answer_about_joint_groups_changes_when_its_reasons_do():
    """A later view with other options of the same names, and groups that were there and are asked for now."""
    root = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    first = root._unflatten(0, (2, 4), ("x", "y"))
    assert joint_axes(first) == {(0, 1)}
    root._unflatten(0, (2, 4), ("x", "y"), backend_override={"x": ("fake", fake_options())})
    with overlay(flatten="existing"):
        assert joint_axes(first) == set()
        torch_overlay.prepare(first)
        assert joint_axes(first) == {(0, 1)}
    assert joint_axes(first["x"]._unflatten("x", (2, 1), ("p", "q"))) == set() and joint_axes(first) == {(0, 1)}


def test_meshes_from_groups_neither_take_nor_give():
    """``from_group`` means this group: no later mesh gets it, and it gets no other."""
    own = dist.new_group([0, 1, 2, 3])
    mesh = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("x",))
    assert mesh.get_group() is own
    assert DeviceMesh("cpu", [0, 1, 2, 3]).get_group() is not own
    again = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("y",))
    assert again.get_group() is own


def fake_options():
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup.Options()


def test_no_stale_group_after_the_world_is_made_anew():
    """Torch counts group names from 0 again: an old mesh must not get a new mesh's group of the same name."""
    old = grid()
    old_name = old._dim_group_names[1]
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    new = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"))
    grid("x", "y")
    assert new.get_group("b") in open_groups()
    assert set(distributed_c10d._world.pg_names.values()) >= set(new._dim_group_names), old_name
    for axis in ("dp", "tp"):
        try:
            group = old.get_group(axis)
        except (RuntimeError, KeyError, ValueError):
            continue
        assert group in open_groups()
        assert tuple(dist.get_process_group_ranks(group)) == {"dp": (1, 5), "tp": (0, 1, 2, 3)}[axis]


def test_a_mesh_that_was_loaded_first_plans_as_those_that_were_not_looked_at():
    """Before the mesh that it came from is here again."""
    saved = pickle.dumps(grid())
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    early, late = pickle.loads(saved), pickle.loads(saved)
    assert early.mesh.shape == (2, 4)
    built = grid()
    assert joint_axes(early) == joint_axes(late) == joint_axes(built) != set()


@pytest.mark.parametrize("axes, sizes, names", [((0,), (2, 4), "dp"), ((0, 1), (2, 4), "dp, tp")])
def test_a_plan_whose_group_is_gone_says_so(axes, sizes, names):
    """Of a plan that was made before, and of one that is made after; there is no second plan."""
    mesh = grid()
    source = [Shard(0) if axis in axes else Replicate() for axis in range(2)]

    def gather(size):
        return DTensor.from_local(torch.ones(size), mesh, source, run_check=False).full_tensor()

    assert gather(2).numel() > 2
    dist.destroy_process_group(find_group(joint_group(mesh, axes).name))
    for size in (2, 3):
        with pytest.raises(RuntimeError, match=rf"needs the process group over {names} of .*destroyed it"):
            gather(size)


def test_a_group_is_not_made_again_where_only_some_can_know_that_it_is_gone():
    """Made by all ranks together: the members of another copy would not come."""
    with overlay(create="world"):
        root = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        dist.destroy_process_group(root._unflatten(0, (2, 4), ("dp", "tp")).get_group("tp"))
        with pytest.raises(RuntimeError, match=r"axis 'tp' over ranks .* was destroyed here"):
            root._unflatten(0, (2, 4), ("dp", "tp"))


@pytest.mark.parametrize("policy, made", [("existing", 0), ("whole", 1)])
def test_nothing_makes_groups_in_the_middle_of_a_step(policy, made):
    """Slices, permutations and redistributions make none, whatever `flatten` says."""
    with overlay(flatten=policy):
        before = len(open_groups())
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        assert len(open_groups()) == before + 3 + made
        views = [mesh["a", "b"], mesh.permute(("c", "a", "b")), DeviceMesh._concatenate([mesh["c"], mesh["a"]])]
        for view in views:
            DTensor.from_local(torch.ones(8), view, [Shard(0)] * view.ndim, run_check=False).full_tensor()
        assert len(open_groups()) == before + 3 + made


def test_one_group_for_the_whole_of_a_universe():
    """However many views of all its ranks there are; a part that is unflattened has one for that part."""
    root = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    views = [root._unflatten(0, sizes, names) for sizes, names in (((2, 4), ("p", "q")), ((2, 2, 2), ("a", "b", "c")))]
    wholes = [joint_group(view, tuple(range(view.ndim))) for view in (*views, views[1].permute(("b", "a", "c")))]
    assert len({group.name for group in wholes}) == 1 and not wholes[2].in_order
    assert wholes[0].name != dist.group.WORLD.group_name
    part = views[0]._unflatten("q", (2, 2), ("x", "y"))["x", "y"]
    assert joint_axes(part) == set(), "slicing makes none"


@pytest.mark.parametrize("device_type, served", [("cpu", True), ("cuda", False)])
def test_what_a_host_has_decides_nothing(device_type, served, monkeypatch):
    """On a gloo world an axis of all ranks has the default group if the mesh is for the CPU, on every host alike."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked what this host has"))
    monkeypatch.setattr(distributed_c10d, "get_backend", lambda group=None: "gloo")
    universe = current_world().open_universe(RankMap.identity(8))
    view = View(RankMap.identity(8), _MeshLayout.from_sizes_strides((8,)))
    group = _default_serves(dist.group.WORLD, universe, Request(view, "dp", (None, None), device_type))
    assert group == served


def test_an_order_that_must_be_kept_is_part_of_what_ranks_compare():
    """And of the key of compiled code, which names the groups."""
    plain, kept = (DeviceMesh("cpu", range(8), preserve_rank_order=order) for order in (False, True))
    said = {_describe(mesh, view_of(mesh).layout, None, [(None, None)]) for mesh in (plain, kept)}
    assert len(said) == 2 and plain._stable_hash() != kept._stable_hash()


def test_two_threads_that_ask_a_loaded_mesh_first_find_one_state(monkeypatch):
    """The second one's knew nothing of the private groups, and took other meshes'."""
    with torch_overlay.private_groups():
        loaded = pickle.loads(pickle.dumps(grid()))
    make, states = state.RankMap, []
    asks = threading.Thread(target=lambda: states.append(shared_state(loaded)))

    def slow(ranks):
        monkeypatch.setattr(state, "RankMap", make)
        asks.start()
        asks.join(0.5)  # while this thread reads the ranks
        return make(ranks)

    monkeypatch.setattr(state, "RankMap", slow)
    states.append(shared_state(loaded))
    asks.join()
    assert states[0] is states[1] is shared_state(loaded) and states[0].private is not None


def test_a_mesh_has_its_groups_again_when_the_overlay_comes_back():
    """Those of redistributions, too, and what it shares with the views that are made then."""
    grid()
    mesh = grid()
    known, name = joint_axes(mesh), joint_group(mesh, (0, 1)).name
    torch_overlay.disable()
    torch_overlay.enable()
    assert joint_axes(mesh) == known == {(0, 1)} and joint_group(mesh, (0, 1)).name == name
    assert universe_of(shared_state(mesh)).number == 2
