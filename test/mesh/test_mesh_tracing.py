"""Meshes where nothing real is at hand: fake tensors, the meta device, compile, LocalTensor, subclasses."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.common_distributed import MultiThreadedTestCase

import torch_overlay
from mesh_harness import STOCK, fake_world, group_ranks, needs_overlay
from way import WAY, needs_package


@pytest.fixture
def world():
    with fake_world(3, 8):
        yield
    torch._dynamo.reset()


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))


# Every mesh operation, and what it shows on rank 3 of 8.
OPERATIONS = {
    "init": (lambda m: cube(), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    "constructor": (lambda m: DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("x", "y")), [[0, 3], [1, 2]]),
    "slice": (lambda m: m["a", "c"], [[2, 3], [6, 7]]),
    "flatten": (lambda m: m["a", "c"]._flatten("ac"), [2, 3, 6, 7]),
    "unflatten": (lambda m: m._unflatten("b", (2, 1), ("x", "y"))["y"], [3]),
    "concatenate": (lambda m: DeviceMesh._concatenate([m["c"], m["a"]]), [[2, 6], [3, 7]]),
    "submeshes": (lambda m: m._get_all_submeshes("a")[3], [3, 7]),
    "permute": (lambda m: m.permute(("c", "a", "b"))["b"], [1, 3]),
    "submesh_at": (lambda m: m.submesh_at("a", at={"b": 0, "c": 0}), [0, 4]),
}
OURS = ("permute", "submesh_at")


@contextlib.contextmanager
def float_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MODES = {"meta": lambda: torch.device("meta"), "inference": torch.inference_mode, "float64": float_default}
MODES |= {} if STOCK else {"fake": FakeTensorMode}  # where stock raises on most


@pytest.mark.parametrize("what", [what for what in OPERATIONS if not STOCK or what not in OURS])
@pytest.mark.parametrize("mode", MODES)
def test_all_operations_ignore_the_mode_of_tensors(world, what, mode):
    """A default device, inference mode, a default type, fake tensors: a mesh is a mesh."""
    before = cube()
    call, ranks = OPERATIONS[what]
    with MODES[mode]():
        mesh, again = call(before), call(cube())
        assert mesh.mesh.tolist() == again.mesh.tolist() == ranks and type(mesh.mesh) is torch.Tensor
        assert hash(mesh) == hash(call(before)) and mesh == call(before)
    assert mesh.mesh.dtype == torch.int32 and mesh.mesh.device.type == "cpu"
    assert call(before).mesh.tolist() == ranks, "and the same outside"
    for axis in range(mesh.ndim if mesh.get_coordinate() else 0):
        group = group_ranks(mesh, axis)
        assert 3 in group and len(group) == mesh.size(axis)


def test_ranks_that_were_first_asked_for_in_inference_mode_are_plain_tensors_after(world):
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    with torch.inference_mode():
        assert mesh.mesh.tolist() == [[3, 1], [2, 0]]
    assert not mesh.mesh.is_inference() and not mesh["b"].mesh.is_inference()


def compiled(function, *args):
    """The function compiled in one graph, called; twice, so that guards are checked too."""
    torch._dynamo.reset()
    fast = torch.compile(function, backend="aot_eager", fullgraph=True)
    fast(*args)
    return fast(*args)


def local_rank(mesh, name):
    """This rank's place on an axis."""
    return mesh.get_local_rank(name)


def test_compiled_code_slices_and_asks_a_mesh(world):
    """Slices, sizes, coordinates and groups inside one graph, of a mesh that comes in as an argument."""
    mesh = cube()

    def asks(x, mesh):
        piece = mesh["a", "c"]
        return x + piece.size(1) + local_rank(mesh, "b") + piece.get_coordinate()[1] + mesh.ndim + mesh["c"].size()

    assert torch.equal(compiled(asks, torch.zeros(2), mesh), torch.full((2,), 2.0 + 1 + 1 + 3 + 2))


traces_meshes = pytest.mark.skipif(
    not hasattr(device_mesh, "_register_distributed_opaque_types"),
    reason="before 2.12 dynamo knows of a mesh its sizes, its coordinates and its groups, and no more",
)


@traces_meshes
def test_compiled_code_asks_a_mesh_for_its_groups():
    """Where the world was made after dynamo was imported: init_process_group empties dynamo's lists of files."""
    import torch._dynamo

    with fake_world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

        def asks(x, mesh):
            return x + mesh.get_coordinate()[1], mesh.get_group(0), mesh.get_group(mesh_dim=1)

        answers = compiled(asks, torch.zeros(2), mesh)
        assert answers[1:] == (mesh.get_group(0), mesh.get_group(1)) and torch.equal(answers[0], torch.full((2,), 3.0))


@needs_package
def test_dynamos_lists_are_its_own_again():
    from torch._dynamo import trace_rules

    torch_overlay.disable()
    lists = [trace_rules.get_mod_inlinelist, trace_rules.get_mod_skiplist]
    before = [{*known()} for known in lists]
    torch_overlay.enable()
    trace_rules.clear_lru_cache()
    assert trace_rules.get_mod_inlinelist() > before[0] and trace_rules.get_mod_skiplist() > before[1]
    torch_overlay.disable()
    assert lists == [trace_rules.get_mod_inlinelist, trace_rules.get_mod_skiplist]
    assert before == [known() for known in lists]


# What compiled code may make of a cube, by the public names.
VIEWS = {
    "permute": lambda m: m.permute(("c", "b", "a")),
    "submesh_at": lambda m: m.submesh_at(("b", "c"), at={"a": 0}),
    "flatten": lambda m: m["a", "b"].flatten("ab"),
    "unflatten": lambda m: m.unflatten("c", (1, 2), ("d", "e")),
    "concatenate": lambda m: DeviceMesh.concatenate([m["c"], m["a"]]),
    "slice of a slice": lambda m: m["b", "c"].permute(("c", "b"))["b"],
    "beside a view": lambda m: DeviceMesh.concatenate([m.permute(("c", "b", "a"))["c"], m["a"]]),
    "a whole mesh": lambda m: DeviceMesh.concatenate([m]),
}


@traces_meshes
@needs_overlay
@pytest.mark.parametrize("what", VIEWS)
def test_compiled_code_makes_views(world, what):
    """In one graph, and again with an equal mesh of its own; a DTensor may lie on what it made."""
    make, graphs = VIEWS[what], []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    def uses(x, mesh):
        view = make(mesh)
        said = view.size() * 100 + view.size(view.ndim - 1) * 10 + view.get_local_rank(view.ndim - 1)
        given = DTensor.from_local(x, view, [Shard(0)] * view.ndim, run_check=False)
        return x + said, given.redistribute(placements=[Replicate()] * view.ndim).to_local()

    torch._dynamo.reset()
    fast = torch.compile(uses, backend=counting, fullgraph=True)
    for mesh in (cube(), cube()):
        view = make(mesh)
        expected = view.size() * 100 + view.size(view.ndim - 1) * 10 + view.get_local_rank(view.ndim - 1)
        for _ in range(2):
            asked, moved = fast(torch.zeros(2, 3), mesh)
            assert torch.equal(asked, torch.full((2, 3), float(expected)))
            assert moved.shape == (2 * view.size(), 3)
    assert len(graphs) <= 2, "at most one for each mesh"


@traces_meshes
@needs_overlay
@pytest.mark.parametrize("what", ["private", "order"])
def test_code_compiled_for_one_mesh_does_not_run_for_an_unequal_one(world, what):
    first = cube()
    if what == "private":
        with torch_overlay.private_groups():
            second = cube()
    else:
        second = DeviceMesh("cpu", first.mesh, mesh_dim_names=first.mesh_dim_names, preserve_rank_order=True)

    def which(x, mesh, known):
        return x + (1 if mesh == known else 2)

    compiled = torch.compile(which, backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(()), mesh, first).item() for mesh in (cube(), second)] == [1, 2]


@traces_meshes
@needs_package
def test_dynamo_knows_what_the_overlay_adds_while_it_is_on():
    from torch._library.opaque_object import _OPAQUE_TYPES

    members = _OPAQUE_TYPES[DeviceMesh].members
    torch_overlay.disable()
    before = {**members}
    torch_overlay.enable()
    assert {"permute", "submesh_at", "flatten", "unflatten"} <= {*members} - {*before}
    with fake_world(3, 8):
        mesh = cube()
        compiled(lambda x: x + mesh.permute(("c", "b", "a")).ndim, torch.zeros(1))
        saved = mesh.__getstate__()
        torch_overlay.disable()
        assert members == before and "_traced_views" not in {*mesh.__dict__, *saved}


@traces_meshes
def test_a_collective_on_an_equal_mesh_uses_that_meshs_group(world):
    """Guards read the mesh's value and the names of its groups; of the ranks they compare one tuple with itself."""
    import torch.distributed._functional_collectives as funcol

    used = []

    def noting(graph, inputs):
        used.extend(str(node.args) for node in graph.graph.nodes if "all_reduce" in str(node.target))
        return graph

    torch._dynamo.reset()
    fast = torch.compile(lambda x, mesh: funcol.all_reduce(x, "sum", (mesh, 0)), backend=noting, fullgraph=True)
    meshes = [cube(), cube()]
    for mesh in (*meshes, *meshes):
        fast(torch.ones(1), mesh)
    assert len(used) == 2 and all(mesh.get_group(0).group_name in one for mesh, one in zip(meshes, used, strict=True))
    assert STOCK or meshes[0]._flatten_rank_map is meshes[0]["a"]._flatten_rank_map


def test_local_tensor_mode_plays_all_ranks_in_one_process():
    """torch's LocalTensorMode: every rank's shard at once, on slices, flattened and unflattened views."""
    local = pytest.importorskip("torch.distributed._local_tensor")
    from torch.distributed.tensor import distribute_tensor

    whole = torch.arange(64.0).reshape(8, 8)
    with fake_world(0, 8), local.LocalTensorMode(8):
        mesh = cube()
        views = [mesh, mesh["a", "b"], mesh["a", "c"]._flatten("ac"), mesh._unflatten("c", (1, 2), ("x", "y"))]
        for view in views:
            tensor = distribute_tensor(whole, view, [Shard(0)] * view.ndim)
            assert torch.equal(tensor.full_tensor().reconcile(), whole)
            moved = tensor.redistribute(placements=[Shard(1)] * view.ndim)
            assert torch.equal(moved.full_tensor().reconcile(), whole)


def test_local_tensor_mode_tells_a_slice_from_one_that_is_gone():
    """Before 2.14 it keeps coordinates by the mesh's id; a slice has that of the one before as soon as nobody holds it.

    The stack leaves that as it is: what it lands on has the mode of later releases. On stock it may be right by chance.
    """
    local = pytest.importorskip("torch.distributed._local_tensor")
    with fake_world(0, 8), local.LocalTensorMode(8) as mode:
        if WAY != "overlay" and hasattr(mode, "_coordinate_cache"):
            pytest.skip("what the package torch_overlay does, where the mode keeps coordinates by id")
        mesh = cube()
        for _ in range(20):
            for name in mesh.mesh_dim_names:
                assert str(mesh[name].get_local_rank()) == str(mesh.get_local_rank(name)), name


class TestThreadsAsRanks(MultiThreadedTestCase):
    """Torch's threaded test backend: two ranks in one process, one world a thread."""

    world_size, made = 2, {}

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_meshes_of_different_threads_are_different_meshes(self):
        self.made[self.rank] = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        dist.barrier()
        self.assertNotEqual(self.made[0], self.made[1])


class Filled(DeviceMesh):
    """Fills in what torch's __init__ would, and doesn't call it."""

    def __init__(self, like, rank_map):
        self._device_type, self._mesh_dim_names, self._rank = "cpu", ("a", "b"), 3
        self._layout = like._layout
        self._rank_map = rank_map
        self._flatten_rank_map = tuple(rank_map.tolist())
        self._root_mesh, self._thread_id, self._hash, self._preserve_rank_order = None, None, None, False
        self._flatten_mapping, self._pg_registry, self._dim_group_names = {}, {}, ["0", "0"]
        (place,) = (like._rank_map.view(2, 4) == tuple(rank_map.tolist()).index(3)).nonzero().tolist()
        self._coordinate_on_dim = type(like.get_coordinate())(place)


class Spare(DeviceMesh):
    """Sets no more than its own methods need."""

    def __init__(self, like, rank_map):
        self._layout, self._rank_map, self._rank, self._root_mesh = like._layout, rank_map, 3, None


def test_a_subclass_that_sets_little_has_its_tensor(world):
    ranks = torch.tensor([0, 2, 4, 6, 3, 1, 5, 7], dtype=torch.int)
    like = DeviceMesh("cpu", torch.arange(8).view(2, 4), _init_backend=False, _rank=3)
    assert Spare(like, ranks).mesh.tolist() == [[0, 2, 4, 6], [3, 1, 5, 7]]


def says(mesh, ranks) -> bool:
    """What such a mesh can be asked: its own ranks, as a tensor and by rank."""
    assert mesh._rank_map is ranks and mesh._flatten_rank_map == tuple(ranks.tolist())
    assert mesh.mesh.tolist() == ranks.reshape(2, 4).tolist() and mesh["b"].mesh.tolist() == [3, 1, 5, 7]
    places = [tuple(each.get_coordinate()) for each in (mesh, mesh["a"])]  # lists before 2.11
    assert (*places, mesh.shape) == ((1, 0), (1,), (2, 4))
    return mesh == mesh and hash(mesh) == hash(mesh)


def test_a_subclass_fills_in_its_own_rank_map(world):
    """As on stock, these are attributes: whoever sets them has set them."""
    like = DeviceMesh("cpu", torch.arange(8).view(2, 4), _init_backend=False, _rank=3)
    ranks = torch.tensor([0, 2, 4, 6, 3, 1, 5, 7], dtype=torch.int)
    filled = Filled(like, ranks)
    assert says(filled, ranks)
    assert filled.__dict__["_rank_map"] is ranks


@needs_package
def test_such_a_subclass_lives_through_enable_and_disable(world):
    """Made on either side, it answers on both."""
    ranks = torch.tensor([0, 2, 4, 6, 3, 1, 5, 7], dtype=torch.int)
    like = DeviceMesh("cpu", torch.arange(8).view(2, 4), _init_backend=False, _rank=3)
    inside = Filled(like, ranks)
    torch_overlay.disable()
    try:
        before = Filled(like, ranks)
        assert says(inside, ranks) and says(before, ranks)
        inside._rank_map = inside._rank_map
    finally:
        torch_overlay.enable()
    assert says(inside, ranks) and says(before, ranks)
