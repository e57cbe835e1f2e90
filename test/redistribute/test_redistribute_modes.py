"""Redistribution where tensors aren't plain: compiled, fake, one process for all ranks, watched. A world of one process
whose collectives move nothing; values under compile are held by the cases on real ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_overlay
from mesh_harness import STOCK, fake_world, needs_overlay
from torch_overlay.distributed.tensor._planner import cost as planner_cost
from way import needs_package

R, S, P = Replicate(), Shard, Partial()


@pytest.fixture
def mesh():
    """Rank 3 of a 2 x 4 mesh whose joint group is at hand."""
    with fake_world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        mesh["dp", "tp"]._flatten("all")
        yield mesh
    torch._dynamo.reset()


def collectives(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items() if count}


def counted() -> dict:
    """What the overlay counted: (by plan, by torch's own code)."""
    from torch_overlay.report import redistributions

    found = redistributions()
    return {"planned": found["redistributions by plan"], "torch": found["redistributions by torch's own code"]}


def moves(mesh, local):
    """A gather, an exchange and a reduction, from a local tensor to local tensors."""
    placed = DTensor.from_local(local, mesh, (S(0), S(1)), run_check=False)
    whole = placed.redistribute(placements=(R, R))
    swapped = placed.redistribute(placements=(S(1), S(0)))
    total = DTensor.from_local(local, mesh, (P, P), run_check=False).redistribute(placements=(S(0), R))
    return whole.to_local() * 2, swapped.to_local() + 1, total.to_local()


@needs_overlay
@pytest.mark.parametrize("rounds", [False, True])
def test_a_compiler_drops_no_exchange_of_a_rank_that_has_nothing(mesh, monkeypatch, rounds):
    """Two tensors of which this rank has no rows and wants columns: it takes part in each exchange, and
    in each round, as those do that send something."""
    if rounds:
        monkeypatch.setattr(planner_cost, "_ASSUMED", {"cpu": planner_cost.Cost(round_bytes=1)})

    def swapped(*locals):
        shape = dict(shape=torch.Size((4, 9)), stride=(9, 1))
        placed = [DTensor.from_local(x, mesh, (S(0), S(0)), run_check=False, **shape) for x in locals]
        return sum(tensor.redistribute(placements=(S(1), S(1))).to_local().sin().sum() for tensor in placed)

    found = []

    def keep(graph, _):
        found.extend(node.name for node in graph.graph.nodes if node.name.startswith("all_to_all"))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    leaves = [torch.ones(0, 9, requires_grad=True) for _ in range(2)]
    with CommDebugMode() as comm:
        swapped(*leaves).backward()
    torch.compile(swapped, backend=backend, fullgraph=True)(*leaves).backward()
    assert len(found) == comm.get_total_counts()
    assert len(found) > 4 if rounds else len(found) == 4


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_moves_are_one_graph_as_on_stock(mesh, backend):
    """The same shapes as without compiling, forward and backward, no graph break, no recompilation."""
    local = torch.ones(8, 4, requires_grad=True)
    plain = moves(mesh, local)
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(lambda local: moves(mesh, local), backend=counter, fullgraph=True)
    for _ in range(2):
        found = fast(local)
        assert [t.shape for t in found] == [t.shape for t in plain]
        sum(t.sum() for t in found).backward()
    assert local.grad.shape == (8, 4) and counter.frame_count == 1


@pytest.mark.parametrize("saved", ["everything", "new_empty"])
@pytest.mark.parametrize("rows", [4, 5])
def test_selective_checkpointing_may_keep_everything(rows, saved):
    """What it keeps isn't written afterwards. 3 columns are cut unevenly, so blocks are put together."""
    keep, drop = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

    def policy(context, operation, *arguments, **named):
        return keep if saved == "everything" or operation is torch.ops.aten.new_empty.default else drop

    def gathered(given):
        return torch.sin(torch.tanh(given.redistribute(placements=(R, R))))

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(rows * 3.0).reshape(rows, 3)
        given = distribute_tensor(whole, mesh, (S(0), S(1)), src_data_rank=None).requires_grad_()
        checkpoint(gathered, given, use_reentrant=False, context_fn=contexts).sum().to_local().backward()
        assert given.grad.to_local().shape == given.to_local().shape


@needs_overlay
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("source, target", [((P, P), (R, R)), ((Partial("max"), S(0)), (R, S(0)))])
def test_what_only_ends_reductions_is_one_plan_for_all_sizes(mesh, dynamic, source, target):
    """One all-reduce, whatever a rank knows of the sizes: else ranks that compiled for others would wait for it."""
    ran = []

    def look(graph, inputs):
        symbols.append(any(not isinstance(n, int) for tensor in inputs for n in getattr(tensor, "shape", ())))
        ran.append([node.target.__name__ for node in graph.graph.nodes if "all_reduce" in str(node.target)])
        return graph.forward

    symbols = []

    def summed(local):
        placed = DTensor.from_local(local, mesh, source, run_check=False)
        return placed.redistribute(placements=target).to_local() * 2

    fast = torch.compile(summed, backend=aot_autograd(fw_compiler=look), fullgraph=True, dynamic=dynamic)
    for rows in (6, 10):
        assert torch.equal(fast(torch.ones(rows, 3)), summed(torch.ones(rows, 3)))
    assert ran and all(len(reduced) == 1 for reduced in ran) and any(symbols) == dynamic


def test_fake_tensors_have_the_shapes_of_real_ones(mesh):
    local = torch.ones(8, 4)
    plain = moves(mesh, local)
    with FakeTensorMode() as mode:
        faked = moves(mesh, mode.from_tensor(local))
    for other in (faked, moves(mesh, local.to("meta"))):
        assert [(t.shape, t.dtype) for t in other] == [(t.shape, t.dtype) for t in plain]


@needs_package  # which counts
def test_local_tensor_mode_runs_torchs_own_code():
    """One process stands for many ranks, of which a plan knows one."""
    local = pytest.importorskip("torch.distributed._local_tensor")
    whole = torch.arange(35.0).reshape(7, 5)
    with fake_world(0, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        with local.LocalTensorMode(8):
            placed = distribute_tensor(whole, mesh, (S(0), S(1)))
            assert torch.equal(placed.redistribute(placements=(S(1), S(0))).full_tensor().reconcile(), whole)
        if not STOCK:
            assert any("many ranks" in why for why in counted()["torch"])


@needs_overlay
def test_code_compiled_on_one_rank_runs_torchs_own_code(mesh):
    """A plan would hold the coordinates of the rank that compiles; torch's steps compute them where they run."""
    from torch_overlay.distributed.tensor._runner.answers import find_answer
    from torch_overlay.distributed.tensor._runner.question import MANY_RANKS

    config = torch.compiler.config  # from 2.14 on
    if not hasattr(config, "compile_on_one_rank"):
        config = pytest.importorskip(
            "torch.distributed.config", reason="since 2.11 code is compiled on one rank for all"
        )
    meta = TensorMeta(torch.Size((16, 16)), (16, 1), torch.float32)
    ends = [DTensorSpec(mesh, placements, tensor_meta=meta) for placements in ((S(0), S(1)), (R, R))]
    for one_rank in (False, True):
        with config.patch(compile_on_one_rank=one_rank), FakeTensorMode(shape_env=ShapeEnv()) as mode:
            found = find_answer(mesh, mode.from_tensor(torch.ones(8, 4)), *ends, False, None)
        assert (getattr(found, "reason", None) == MANY_RANKS) is one_rank, found


@needs_overlay
def test_a_shard_becomes_a_term_of_a_sum_on_every_release(mesh):
    """Torch does it from 2.14 on. What an operator may ask for stays torch's to say."""
    from torch.distributed.tensor import _redistribute

    meta = TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
    ends = [DTensorSpec(mesh, placements, tensor_meta=meta) for placements in ((S(0), R), (P, R))]
    found = _redistribute.redistribute_local_tensor(torch.ones(4, 4), *ends)
    assert torch.equal(found, torch.cat([torch.ones(4, 4), torch.zeros(4, 4)]))


@needs_overlay  # stock takes the subclass for its equal
@needs_package  # which counts
def test_partial_values_of_other_classes_are_torchs(mesh):
    """A subclass may reduce as it likes: its own methods are called."""

    class Doubled(Partial):
        def _reduce_value(self, tensor, mesh, mesh_dim):
            return tensor * 2

    plain = DTensor.from_local(torch.ones(4), mesh, (R, P), run_check=False).redistribute(placements=(R, R))
    assert plain.to_local().shape == (4,) and Doubled() == P, "what is remembered of its equal isn't its own"
    placed = DTensor.from_local(torch.ones(4), mesh, (R, Doubled()), run_check=False)
    assert placed.redistribute(placements=(R, R)).to_local().tolist() == [2.0] * 4
    assert counted()["torch"].get("a placement of the class Doubled")


@needs_package  # which counts
def test_strided_shards_are_planned_whatever_order_torch_writes_beside_them(mesh):
    """As FSDP over TP cuts a weight."""
    held = DTensor.from_local(torch.ones(2, 4), mesh, (_StridedShard(0, split_factor=4), S(0)), run_check=False)
    before = counted()
    moved = held.redistribute(placements=(S(1), R))
    back = moved.redistribute(placements=held.placements)
    assert counted() == {**before, "planned": before["planned"] + 2}
    assert back.to_local().shape == (2, 4) and moved.shape == (16, 4)


@needs_package  # which counts
def test_the_cache_of_plans_is_bounded(mesh, monkeypatch):
    """A full cache is cleared; what its plans did is planned again."""
    from torch_overlay import report
    from torch_overlay.distributed.tensor._runner import answers as ours

    monkeypatch.setattr(ours, "CACHED", 10)
    ours.forget_answers()
    for rows in [*range(2, 32, 2), 2]:
        DTensor.from_local(torch.ones(rows, 3), mesh, (S(0), R), run_check=False).redistribute(placements=(R, R))
        assert report.redistributions()["plans in the cache"] <= 10


@needs_package
def test_the_overlay_leaves_no_plan_behind():
    import torch_overlay
    from torch_overlay.report import redistributions

    with fake_world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        moves(mesh, torch.ones(8, 4))
        assert redistributions()["plans in the cache"]
        torch_overlay.disable()
        assert not redistributions()["plans in the cache"]
        torch_overlay.enable()


def test_a_norm_over_an_axis_of_one_rank_is_there_already():
    """Its power would not be: 1e-25 squared is zero in float32."""
    with fake_world(3, 8):
        mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp", "tp"))
        placed = DTensor.from_local(torch.tensor([1e-25]), mesh, (R, S(0)), run_check=False)
        assert torch.linalg.vector_norm(placed).full_tensor() == torch.tensor(1e-25)


def test_a_cut_keeps_the_memory_format(mesh):
    whole = torch.ones(4, 3, 8, 8).to(memory_format=torch.channels_last)
    found = DTensor.from_local(whole, mesh, (R, R), run_check=False).redistribute(placements=(S(0), R))
    assert found.to_local().is_contiguous(memory_format=torch.channels_last)


def test_unmerged_steps_can_be_asked_for(mesh):
    from torch.distributed.tensor._redistribute import disable_redistribute_transform_optimization

    placed = DTensor.from_local(torch.ones(8, 4), mesh, (P, P), run_check=False)
    with CommDebugMode() as merged:
        placed.redistribute(placements=(R, R))
    with disable_redistribute_transform_optimization(), CommDebugMode() as unmerged:
        placed.redistribute(placements=(R, R))
    assert collectives(merged) == {"all_reduce": 1} and collectives(unmerged) == {"all_reduce": 2}


class Marked(torch.Tensor):
    """A tensor of another class, that may know only some operations."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@needs_package  # which counts
def test_a_local_tensor_of_a_class_of_its_own_takes_torch_s_steps(mesh):
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    placed = DTensor.from_local(torch.ones(8, 4), mesh, (S(0), R), run_check=False)
    whole = placed.redistribute(placements=(R, R))
    before = counted()
    redistribute_local_tensor(placed.to_local().as_subclass(Marked), placed._spec, whole._spec)
    reason = "a local tensor of a class of its own"
    assert counted()["torch"].get(reason, 0) == before["torch"].get(reason, 0) + 1
    assert counted()["planned"] == before["planned"]


KEEPS_COMPILED = pytest.mark.skipif(
    not hasattr(DTensorSpec, "_stable_hash"), reason="before 2.12 no compiled code of DTensors is kept on disk"
)


@KEEPS_COMPILED
def test_caches_may_ask_wherever_a_spec_is():
    """Outside the mesh, on a mesh whose group is gone, and without a world; what needs no group works on, too."""

    def hashed(mesh):
        meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
        return len(DTensorSpec(mesh, (R, R), tensor_meta=meta)._stable_hash()) == 32

    def cut(mesh, length):
        whole = DTensor.from_local(torch.ones(length), mesh, (R, R), run_check=False)
        return whole.redistribute(placements=(R, S(0))).to_local().shape == (length // mesh.size(1),)

    with fake_world(7, 8):
        outside = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        dist.destroy_process_group(mesh.get_group("tp"))
        assert outside.get_coordinate() is None and hashed(outside) and hashed(mesh) and cut(mesh, 4)
    assert hashed(other) and cut(other, 8)


@KEEPS_COMPILED
@needs_overlay
def test_compiled_code_on_disk_is_found_again_until_another_group_is_at_hand(mesh, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", True)
    torch_overlay.enable(flatten="existing")
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b"))

    def found_on_disk():
        torch._dynamo.reset()
        counted = torch._dynamo.utils.counters["aot_autograd"]
        counted.clear()
        source = DTensor.from_local(torch.ones(2, 4), mesh, (S(0), S(1)), run_check=False)
        torch.compile(lambda given: given.redistribute(placements=(R, R)) * 2)(source)
        return counted["autograd_cache_hit"] - counted["autograd_cache_miss"]

    assert (found_on_disk(), found_on_disk()) == (-1, 1)
    mesh["a", "b"]._flatten("both")
    assert found_on_disk() == -1
