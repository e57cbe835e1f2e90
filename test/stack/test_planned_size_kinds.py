# Owner(s): ["oncall: distributed"]
"""Sizes whose bytes are rounded are told from others."""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._answers import find_answer
from torch_overlay.distributed.tensor._planner.forms import without_sizes

ALL_OPEN = [DimDynamic.DYNAMIC] * 2
ROWS_OPEN = [DimDynamic.DYNAMIC, DimDynamic.STATIC]
TOPOLOGY = (("a", 1e9, 1e-6), ("b", 1e9, 1e-3), ("c", 1e9, 1e-3))
GROUPS = {"mesh_share_groups": "names", "mesh_joint_groups": "create"}


def answer_for(mesh, source, target, shape, dynamic):
    """What is found for a local tensor of this shape, the guards on its sizes, and those that are symbols."""
    context = StatelessSymbolicContext(dynamic_sizes=dynamic) if dynamic else None
    env = ShapeEnv() if dynamic else None
    mode = FakeTensorMode(shape_env=env)
    local = mode.from_tensor(torch.empty(shape, device="meta"), symbolic_context=context)
    symbols = [size.node.expr for size in local.shape if isinstance(size, torch.SymInt)]
    with mode:
        given = DTensor.from_local(local, mesh, source, run_check=False)
        spec = DTensorSpec(mesh, target, tensor_meta=given._spec.tensor_meta)
        found = find_answer(mesh, local, given._spec, spec, False, None)
    return found, env.guards if dynamic else [], symbols


def admitted(case, source, target, shape, lengths):
    """Of these lengths of dim 1, those that the guards for a local tensor of this shape admit; they have its plan."""
    traced, guards, symbols = answer_for(case.mesh, source, target, shape, ALL_OPEN)
    found = []
    for length in lengths:
        known, _, _ = answer_for(case.mesh, source, target, (shape[0], length), None)
        values = dict(zip(symbols, (shape[0], length)))
        if all(bool(guard.expr.subs(values)) for guard in guards):
            found.append(length)
            case.assertEqual(without_sizes(known.steps), without_sizes(traced.steps), msg=f"{length}")
    return found


class TestSizeKinds(TestCase):
    """On a 2 x 2 x 2 mesh of which two axes have a latency of 1 ms, in a world of 8 of which this process plays one."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        planned = config.patch(plan_redistribution=True, mesh_topology=TOPOLOGY, **GROUPS)
        planned.__enter__()
        self.addCleanup(planned.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    def test_multiples_of_all_ranks_are_told_from_others(self) -> None:
        source, target = (Replicate(), Shard(0), Shard(1)), (Shard(1), Replicate(), Replicate())
        lengths = (1536, 1538, 2048, 3072)  # of dim 1 on each rank; the tensor has twice as many
        self.assertEqual(admitted(self, source, target, (32, 1536), lengths), [1536, 2048])
        self.assertEqual(admitted(self, source, target, (32, 1538), lengths), [1538])


class TestLeastSizes(TestCase):
    """On a 2 x 3 x 2 mesh, in a world of 12 of which this process plays one."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=12)
        self.addCleanup(dist.destroy_process_group)
        planned = config.patch(plan_redistribution=True, **GROUPS)
        planned.__enter__()
        self.addCleanup(planned.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("a", "b", "c"))

    def test_known_columns_keep_a_tensor_from_sharing(self) -> None:
        """Two rows have another plan, so the number of elements is guarded on, not that 12 divides the rows."""
        ends = (Replicate(), Shard(1), Shard(1)), (Shard(1), Replicate(), Shard(0))
        traced, guards, (symbol,) = answer_for(self.mesh, *ends, (90, 4101), ROWS_OPEN)
        for rows, same in ((2, False), (84, True), (90, True), (96, True)):
            known, _, _ = answer_for(self.mesh, *ends, (rows, 4101), None)
            self.assertEqual(without_sizes(known.steps) == without_sizes(traced.steps), same)
            self.assertEqual(all(bool(guard.expr.subs({symbol: rows})) for guard in guards), same)


class TestNoKinds(TestCase):
    """On a 2 x 2 mesh of which one axis has a latency of 1 ms, in a world of 4 of which this process plays one."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        planned = config.patch(plan_redistribution=True, mesh_topology=TOPOLOGY[:2], **GROUPS)
        planned.__enter__()
        self.addCleanup(planned.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def test_one_plan_for_all_sizes_asks_for_no_guard(self) -> None:
        for shape in ((3, 3), (5, 3), (4, 4)):
            _, guards, _ = answer_for(self.mesh, (Shard(0), Shard(1)), (Replicate(),) * 2, shape, ALL_OPEN)
            self.assertEqual([guard.expr for guard in guards], [], msg=f"{shape}")

    def test_rounds_ask_for_no_guard_on_multiples(self) -> None:
        """More elements take more rounds, rounded or not; 4 divides 8 columns, not 10."""
        self.assertEqual(admitted(self, (Shard(0),) * 2, (Shard(1), Shard(0)), (8, 8), (8, 10)), [8, 10])


if __name__ == "__main__":
    run_tests()
