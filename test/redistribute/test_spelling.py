"""Where a plan is one collective over one axis, evenly split, the operations are torch's: those that a mode sees, and
those that run where nobody looks on."""

import itertools
from collections import Counter

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from mesh_harness import fake_world, needs_overlay

pytestmark = needs_overlay

KINDS = (Replicate(), Shard(0), Shard(1), Shard(2), Partial(), Partial("max"))
SHAPE = (8, 16, 24)


@pytest.fixture
def mesh():
    with fake_world(3, 8):
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


class Recorder(TorchDispatchMode):
    """What torch does with plain tensors, in order; how a result waits for its collective is no difference."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else len(a) if isinstance(a, list) else a for a in args]
        if "wait_tensor" not in str(op) and "_wrap_tensor" not in str(op):
            self.seen.append((str(op), *map(str, shapes)))
        return op(*args, **(kwargs or {}))


def ends(mesh, source, target, shape=SHAPE, dtype=torch.float32):
    """The specs, and the local tensor of this rank."""
    strides = tuple(torch.empty(shape, device="meta").stride())
    specs = [
        DTensorSpec(mesh, placed, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))
        for placed in (source, target)
    ]
    local = torch.zeros(shape, dtype=dtype)
    for axis, placement in enumerate(source):
        if placement.is_shard():
            local = local.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    return local.contiguous(), *specs


def plan_of(local, source, target, async_op=False):
    from torch_overlay.distributed.tensor._runner.answers import find_answer

    return find_answer(source.mesh, local, source, target, async_op, None)


def pairs():
    """Placements of which one axis changes."""
    for old, new, other in itertools.product(KINDS, KINDS, KINDS):
        mixed = old.is_partial() and other.is_partial() and old != other
        if old != new and not new.is_partial() and not mixed:
            yield (other, old), (other, new)
            yield (old, other), (new, other)


def by_torch(local, source, target, **how):
    from torch_overlay.distributed.tensor._redistribute import redistribute_by_steps

    return redistribute_by_steps(local, source, target, **how)


@pytest.mark.parametrize("async_op", [False, True])
def test_the_operations_are_torchs(mesh, async_op):
    """Of each pair whose plan says so: the text of DebugMode, what runs unseen, and what kind of tensor comes out."""
    from torch_overlay.distributed.tensor._planner.steps import Collective

    kinds = Counter()
    for source, target in pairs():
        local, *specs = ends(mesh, source, target)
        plan = plan_of(local, *specs, async_op)
        collective = plan.steps and isinstance(plan.steps[0], Collective)
        exchanged = any(old.is_shard() and new.is_shard() and old != new for old, new in zip(source, target))
        steps = torch_redistribute._gen_transform_infos(*specs)
        assert plan.same_step_by_step(mesh) == (collective and len(steps) == 1 and not exchanged), (source, target)
        if not plan.same_step_by_step(mesh):
            continue
        kinds[type(plan.steps[0]).__name__] += 1
        texts = []
        for redistribute in (by_torch, torch_redistribute.redistribute_local_tensor):
            with DebugMode() as mode:
                redistribute(local, *specs, async_op=async_op)
            texts.append(mode.debug_string())
        assert texts[0] == texts[1] != ""
        with Recorder() as theirs:
            by_torch(local, *specs, async_op=async_op)
        with Recorder() as ours:
            result = local
            for run in plan.functions:
                result = run(result)
        assert ours.seen == theirs.seen, (source, target)
        expected = by_torch(local, *specs, async_op=async_op)
        result = torch_redistribute.redistribute_local_tensor(local, *specs, async_op=async_op)
        assert (type(result), result.shape, result.stride()) == (type(expected), expected.shape, expected.stride())
        assert not isinstance(expected, AsyncCollectiveTensor) or async_op
    assert kinds.keys() == {"AllGather", "ReduceScatter", "AllReduce"}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_what_goes_into_a_reduction_is_row_major(mesh, dim, memory_format):
    """Torch's cat keeps the memory format that all its tensors share."""
    from torch_overlay.distributed.tensor._runner.specs import scattered

    local, *specs = ends(mesh, (Replicate(), Partial()), (Replicate(), Shard(dim)), (4, 8, 8, 3))
    (step,) = plan_of(local, *specs).steps
    coordinate = tuple(mesh.get_coordinate())
    pack = scattered(step, step.before.box(coordinate), step.after.box(coordinate))
    values = torch.rand(4, 8, 8, 3)
    packed = pack(values.contiguous(memory_format=memory_format))
    assert packed.is_contiguous() and torch.equal(packed, torch.cat(values.chunk(4, dim)))


def test_a_short_shard_is_padded_by_torch_where_shards_are_uneven():
    """Of nine columns on two ranks the first has five, by torch's rule; with four, torch pads one more. What isn't
    padded is an error still: too long a shard, or another dim."""
    for columns, rows, fits in ((4, 6, True), (0, 6, True), (6, 6, False), (4, 5, False)):
        with fake_world(0, 2):
            mesh = init_device_mesh("cpu", (2,))
            given = DTensor.from_local(
                torch.ones(rows, columns), mesh, [Shard(1)], run_check=False, shape=torch.Size((6, 9)), stride=(9, 1)
            )
            if fits:
                assert given.redistribute(mesh, [Replicate()]).to_local().shape == (6, 9)
                continue
            with pytest.raises(ValueError, match="Nothing was sent"):
                given.redistribute(mesh, [Replicate()])
