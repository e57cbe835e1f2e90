# Owner(s): ["oncall: distributed"]
"""Where more elements have another plan, guards say up to where the traced one holds."""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._answers import find_answer
from torch_overlay.distributed.tensor._planner.forms import without_sizes

ALL_OPEN = [DimDynamic.DYNAMIC] * 2
ROWS_OPEN = [DimDynamic.DYNAMIC, DimDynamic.STATIC]


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


class TestSizeGuards(TestCase):
    """On a 2 x 2 x 2 mesh that is flattened, in a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        planned = config.patch(plan_redistribution=True, mesh_share_groups="names")
        planned.__enter__()
        self.addCleanup(planned.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        self.mesh._flatten("abc")

    def test_more_elements_have_rounds(self) -> None:
        source, target = (Replicate(), Shard(1), Shard(1)), (Shard(1), Replicate(), Replicate())
        lengths = (4, 16, 256, 512, 1024)  # of dim 1 on each rank; the tensor has four times as many
        known = [answer_for(self.mesh, source, target, (4096, length), None)[0] for length in lengths]
        plans = {length: without_sizes(program.steps) for length, program in zip(lengths, known)}
        for length, same in ((16, [4, 16, 256]), (1024, [1024])):
            self.assertEqual(admitted(self, source, target, (4096, length), lengths), same)
            self.assertEqual([other for other in lengths if plans[other] == plans[length]], same)

    def test_few_rows_have_another_plan(self) -> None:
        """Fewer than the mesh has ranks, where only the number of rows is open: a small batch."""
        self.mesh["b", "c"]._flatten("bc")
        ends = (Replicate(), Shard(1), Shard(1)), (Shard(1), Shard(1), Shard(1))
        traced, guards, (symbol,) = answer_for(self.mesh, *ends, (64, 9136), ROWS_OPEN)
        for rows, same in ((2, False), (64, True)):
            known, _, _ = answer_for(self.mesh, *ends, (rows, 9136), None)
            self.assertEqual(without_sizes(known.steps) == without_sizes(traced.steps), same)
            self.assertEqual(all(bool(guard.expr.subs({symbol: rows})) for guard in guards), same)

    def test_shards_that_become_terms_have_their_plan_alone(self) -> None:
        """It changes with more elements, and changes back."""
        ends = (Shard(0), Partial(), Shard(0)), (Partial(), Shard(0), Partial())
        lengths = (1680, 3360, 16384, 65536)
        plans = [without_sizes(answer_for(self.mesh, *ends, (18, length), None)[0].steps) for length in lengths]
        self.assertEqual([plan == plans[0] for plan in plans], [True, True, False, True])
        self.assertEqual(admitted(self, *ends, (18, 1680), lengths), [1680])


if __name__ == "__main__":
    run_tests()
