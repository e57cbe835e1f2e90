"""What a plan may remember from one world, one mesh and one group to the next; one process plays a rank at a time."""

import contextlib
import gc
import pickle
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay
from mesh_harness import joint_group, needs_overlay
from torch_overlay.distributed.tensor import _redistribute
from torch_overlay.distributed.tensor._runner.answers import Fallback
from torch_overlay.distributed.tensor._runner.at_hand import joint_axes
from way import needs_package

R, S, P = Replicate(), Shard, Partial
AVERAGE = P("avg")


@contextlib.contextmanager
def world(rank, size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(mesh):
    given = DTensor.from_local(torch.arange(8.0), mesh, [Replicate()], run_check=False)
    return given.redistribute(mesh, [Shard(0)]).to_local().tolist()


def from_group():
    return DeviceMesh.from_group(dist.group.WORLD, "cpu")


def unshared():
    torch_overlay.enable(share_groups="off")
    return init_device_mesh("cpu", (4,))


@pytest.mark.parametrize("make", [from_group, unshared])
def test_another_rank_in_a_new_world_gets_its_own_shard(make):
    with torch_overlay.enabled():
        for rank in range(4):
            with world(rank, 4):
                mesh = make()
                assert [shard(mesh), shard(mesh)] == [[2.0 * rank, 2.0 * rank + 1]] * 2


def test_a_loaded_flattened_view_finds_its_own_group():
    def build():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "cp"))
        mesh["dp", "cp"]._flatten("dp_cp")
        return mesh

    with torch_overlay.enabled():
        with world(0, 8):
            saved = pickle.dumps(build())
        with world(0, 8):
            loaded = pickle.loads(saved)
            build()
            assert dist.get_process_group_ranks(loaded.get_group("dp_cp")) == [0, 1, 2, 3]
            assert dist.get_process_group_ranks(loaded.get_group("pp")) == [0, 4]


@needs_overlay
def test_nothing_of_a_world_stays_for_its_plans():
    """Jobs that open world after world would keep every group of each, and gloo's threads with them."""
    seen = []
    for _ in range(3):
        with world(5, 8):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
            held = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)
            held.redistribute(placements=[Shard(1), Shard(0)])
            seen.append(weakref.ref(mesh))
            del mesh, held
    gc.collect()
    assert [ref() is None for ref in seen[:2]] == [True, True]  # the last may wait for the next world


@needs_overlay
@pytest.mark.parametrize("first", [0, 1])
def test_equal_meshes_keep_their_flattened_views_apart(first):
    """Of one name, over other axes: if a rank took one for the other, it would wait for who isn't there."""
    torch_overlay.enable(flatten="existing")
    with world(0, 8):
        meshes = [init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c")) for _ in range(2)]
        axes = [(0, 1), (1, 2)]
        for mesh, flat in zip(meshes, axes):
            mesh[tuple("abc"[axis] for axis in flat)]._flatten("f")
        assert meshes[0] == meshes[1]
        for turn in (first, 1 - first):
            assert joint_axes(meshes[turn]) == {axes[turn]}
            whole, one = [Replicate()] * 3, Replicate()
            source = [Shard(0), Shard(0), one] if turn == 0 else [one, Shard(0), Shard(0)]
            with CommDebugMode() as counted:
                DTensor.from_local(torch.ones(4), meshes[turn], source, run_check=False).redistribute(placements=whole)
            assert counted.get_total_counts() == 1


@needs_overlay
@pytest.mark.parametrize("first", [0, 1])
def test_equal_meshes_keep_their_groups_apart(first):
    with world(0, 8):
        meshes = [init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c")) for _ in range(2)]
        for mesh in meshes:
            mesh["a", "b"]._flatten("f")
        with torch_overlay.private_groups():
            own = meshes[0]["b", "c"]._flatten("g")
        names = [mesh["f"].get_group().group_name for mesh in meshes]
        assert names[0] != names[1] != own.get_group().group_name
        for turn in (first, 1 - first):
            assert joint_group(meshes[turn], (0, 1)).name == names[turn]
            assert (1, 2) not in joint_axes(meshes[turn]), "what was flattened in private serves nobody else"


def test_no_memory_is_shared_that_torch_would_not_share():
    """A dim that torch gathers and cuts again, since an axis of one rank comes or goes outside of another."""
    one, s0, s1 = Replicate(), Shard(0), Shard(1)
    with world(3, 8):
        mesh = init_device_mesh("cpu", (1, 8), mesh_dim_names=("replicate", "shard"))
        pairs = [((s0, s0), (one, s0)), ((one, s0), (s0, s0)), ((s1, s0), (s0, s0)), ((one, s0), (s1, s0))]
        shared = []
        for source, target in pairs:
            given = DTensor.from_local(torch.zeros(1, 2), mesh, source, run_check=False)
            result = given.redistribute(placements=target)
            assert result.to_local().shape == (1, 2)
            result._local_tensor.add_(1)
            shared.append(bool(given.to_local().any()))
    assert shared == [False, False, False, True]


def test_conjugated_numbers_travel_resolved():
    with torch_overlay.enabled(), world(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        assert shard(mesh) == list(map(float, range(8)))
    with torch_overlay.enabled(), world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.full((2, 3), 1 + 2j).conj()
        for dim in (0, 1):
            given = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            assert given.redistribute(mesh, [Replicate()]).to_local().dtype == torch.complex64


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize(
    "ends",
    [
        ((R, AVERAGE), (R, R)),
        ((P(), AVERAGE), (S(0), S(0))),
        ((AVERAGE, AVERAGE), (S(0), S(0))),
    ],
)
@pytest.mark.parametrize("flattened", [pytest.param(True, marks=needs_package), False])  # torch's own merging divides
def test_whole_numbers_stay_whole(ends, flattened, dtype):
    """Where torch's merging divides a sum, or a plan would, they became floating-point numbers."""
    with torch_overlay.enabled(), world(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        if flattened:
            mesh["a", "b"]._flatten("ab")

        def found():
            given = DTensor.from_local(torch.ones(8, dtype=dtype), mesh, ends[0], run_check=False)
            return given.redistribute(placements=ends[1])

        for run in (found, torch.compile(found, backend="aot_eager", fullgraph=True)):
            assert run().dtype == run().to_local().dtype == dtype
        torch._dynamo.reset()
        for given in (torch.ones(8), torch.ones(8, dtype=dtype)):
            terms = DTensor.from_local(given, mesh, ends[0], run_check=False)
            with CommDebugMode() as counted:
                terms.redistribute(placements=ends[1])
            assert counted.get_total_counts() == 1, "of whole numbers as of real ones"


@needs_package
def test_whole_numbers_stay_whole_where_torchs_own_steps_run():
    """Its method ends with a cast since 2.13, and so does the way round autograd."""
    with torch_overlay.enabled(), world(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh["a", "b"]._flatten("ab")
        given = DTensor.from_local(torch.ones(8, dtype=torch.int64), mesh, (AVERAGE, AVERAGE), run_check=False)
        with mock.patch.object(_redistribute, "find_answer", lambda *_: Fallback("asked for")):
            found = given.redistribute(placements=(R, R))
        assert found.dtype == found.to_local().dtype == torch.int64


@needs_package  # stock's reduce-scatter gives something
@pytest.mark.parametrize("op, target", [("max", (R, R)), ("min", (S(0), R)), ("product", (S(0), S(0)))])
def test_what_has_no_answer_for_complex_numbers_is_refused(op, target):
    """On every way, also where torch's own steps run; over one rank there is nothing to reduce."""
    with torch_overlay.enabled(), world(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        given = DTensor.from_local(torch.ones(8, dtype=torch.complex64), mesh, (P(op), P(op)), run_check=False)
        says = rf"reduce_op {op} does not support complex tensors: .* over 2 ranks\. Gather the terms as shards of a"
        with CommDebugMode() as counted, pytest.raises(RuntimeError, match=says):
            given.redistribute(placements=target)
        with mock.patch.object(_redistribute, "find_answer", lambda *_: Fallback("asked for")):
            with counted, pytest.raises(RuntimeError, match=says):
                given.redistribute(placements=target)
        assert not counted.get_total_counts()
        narrow = init_device_mesh("cpu", (1, 4), mesh_dim_names=("a", "b"))["a"]
        alone = DTensor.from_local(torch.ones(8, dtype=torch.complex64), narrow, (P(op),), run_check=False)
        assert torch.equal(alone.redistribute(placements=target[:1]).to_local(), alone.to_local())


class Own(Partial):
    """A user's reduction, of which the overlay knows nothing."""

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return 77


def test_torchs_own_code_gets_what_it_takes():
    """A target without tensor_meta is enough for torch."""
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    with torch_overlay.enabled(), world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        meta = TensorMeta(torch.Size([2]), (1,), torch.float)
        ends = DTensorSpec(mesh, (Own(),), meta), DTensorSpec(mesh, (Replicate(),))
        assert torch.equal(redistribute_local_tensor(torch.ones(2), *ends), torch.ones(2))


def test_a_column_is_sent_without_the_gaps_between_its_elements():
    """It is cut off before it is sent; as one dim it would be a view with a stride, of which no bytes can be taken."""
    with torch_overlay.enabled(), world(0, 8):
        mesh = init_device_mesh("cpu", (2, 4))
        for dtype in (torch.complex64, torch.float32):
            for source, target in (
                ((Shard(0), Replicate()), (Replicate(), Shard(1))),
                ((Shard(0), Replicate()), (Shard(1), Shard(1))),
            ):
                given = DTensor.from_local(torch.ones(8, 4, dtype=dtype), mesh, source, run_check=False)
                assert given.redistribute(placements=target).to_local().dtype == dtype


def test_a_shard_keeps_nothing_of_what_it_was_cut_from():
    """All ranks reduce everything, since 31 rows scattered over 64 ranks are mostly padding, and keep a part."""
    with torch_overlay.enabled(), world(1, 64):
        mesh = init_device_mesh("cpu", (64,))
        given = DTensor.from_local(torch.ones(31, 16), mesh, [P()], run_check=False)
        shard_ = given.redistribute(placements=[S(0)]).to_local()
        assert shard_.untyped_storage().nbytes() == 4 * shard_.numel()


def test_bytes_are_read_off_a_column():
    """Of one column, which is contiguous with any stride; a type that travels as bytes needs stride 1."""
    with torch_overlay.enabled(), world(1, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        local = torch.ones(2, 2, dtype=torch.int16).t().contiguous().t()
        given = DTensor.from_local(local, mesh, (R, S(0)), run_check=False)
        assert given.redistribute(placements=(S(1), R)).to_local().shape == (8, 1)


@pytest.mark.parametrize("size", [16, 1024])  # large tensors are sorted and added up in place
@pytest.mark.parametrize("ends", [((P(), P()), (S(1), S(0))), ((P(), S(0)), (S(1), R)), ((S(0), S(1)), (R, R))])
def test_a_local_tensor_under_autograd_is_redistributed_as_on_stock(ends, size):
    """Torch's function called by hand: nothing changes a tensor that autograd looks at."""
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    with torch_overlay.enabled(), world(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        given = DTensor.from_local(torch.ones(size, size), mesh, ends[0], run_check=False)
        target = DTensorSpec(mesh, ends[1], tensor_meta=given._spec.tensor_meta)
        local = given.to_local().clone().requires_grad_()
        try:
            torch.ops._c10d_functional.all_gather_into_tensor(local.clone(), 2, mesh.get_group("a").group_name)
        except RuntimeError:
            pytest.skip("before 2.11 the fake backend gathers in place, which autograd refuses")
        found = redistribute_local_tensor(local, given._spec, target)
        assert found.shape == redistribute_local_tensor(local.detach(), given._spec, target).shape


@needs_package  # which turns itself on and off
def test_results_on_a_mesh_that_is_made_under_the_overlay_lie_on_it():
    """Torch keeps what an operation gives, with the mesh in it; an equal mesh from before has none of our groups."""
    torch_overlay.disable()
    with world(0, 8):
        before = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        placed = [Shard(0), Shard(0)]
        assert (DTensor.from_local(torch.ones(2), before, placed, run_check=False) + 1).device_mesh is before
        torch_overlay.enable()
        after = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        assert before == after
        there = DTensor.from_local(torch.ones(2), after, placed, run_check=False) + 1
        assert there.device_mesh is after
        with CommDebugMode() as counted:
            there.full_tensor()
        assert counted.get_total_counts() == 1
