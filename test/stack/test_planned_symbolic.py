# Owner(s): ["oncall: distributed"]
"""Sizes that a compiler leaves open have the plan of known sizes, and guards that say of which."""

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


class TestOpenSizes(TestCase):
    """On a mesh of 4, in a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        planned = config.patch(plan_redistribution=True)
        planned.__enter__()
        self.addCleanup(planned.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (4,))

    def test_the_plan_is_that_of_known_sizes(self) -> None:
        for source, target in ((Shard(0), Shard(1)), (Shard(0), Replicate()), (Partial(), Shard(1))):
            open_sizes, guards, _ = answer_for(self.mesh, [source], (target,), (8, 16), ALL_OPEN)
            known, _, _ = answer_for(self.mesh, [source], (target,), (8, 16), None)
            self.assertEqual(without_sizes(open_sizes.steps), without_sizes(known.steps), msg=f"{source} to {target}")
            divided = any("Mod" in str(guard.expr) for guard in guards)
            self.assertEqual(divided, target == Shard(1), msg="what is gathered was cut evenly")

    def test_what_only_reduces_is_one_plan_for_all_sizes(self) -> None:
        one, guards, _ = answer_for(self.mesh, [Partial()], (Replicate(),), (8, 16), ALL_OPEN)
        other, _, _ = answer_for(self.mesh, [Partial()], (Replicate(),), (5, 3), ALL_OPEN)
        self.assertIs(one, other)
        self.assertEqual(guards, [])


if __name__ == "__main__":
    run_tests()
