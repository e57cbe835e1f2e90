# Owner(s): ["oncall: distributed"]
"""Where more elements have another plan, guards say up to where the traced one holds."""

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

    def _ask(self, source, target, shape, dynamic):
        """The answer for a tensor of this shape, the guards on its sizes, and its local sizes."""
        for placement in source:
            if placement.is_shard():
                shape = [n // 2 if dim == placement.dim else n for dim, n in enumerate(shape)]
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2) if dynamic else None
        env = ShapeEnv() if dynamic else None
        mode = FakeTensorMode(shape_env=env)
        local = mode.from_tensor(torch.empty(shape, device="meta"), symbolic_context=context)
        sizes = [size.node.expr for size in local.shape] if dynamic else list(local.shape)
        with mode:
            given = DTensor.from_local(local, self.mesh, source, run_check=False)
            spec = DTensorSpec(self.mesh, target, tensor_meta=given._spec.tensor_meta)
            found = find_answer(self.mesh, local, given._spec, spec, False, None)
        return found, env.guards if dynamic else [], sizes

    def _admitted(self, source, target, n: int) -> list[int]:
        """The lengths of dim 1 that the guards admit for a trace with this one; they have its plan."""
        traced, guards, symbols = self._ask(source, target, (4096, n), True)
        admitted = []
        for length in (16, 64, 1024, 2048, 4096):
            known, _, sizes = self._ask(source, target, (4096, length), False)
            values = dict(zip(symbols, sizes))
            if all(bool(guard.expr.subs(values)) for guard in guards):
                admitted.append(length)
                self.assertEqual(without_sizes(known.steps), without_sizes(traced.steps), msg=f"{length}")
        return admitted

    def test_more_elements_have_rounds(self) -> None:
        source, target = (Replicate(), Shard(1), Shard(1)), (Shard(1), Replicate(), Replicate())
        self.assertEqual(self._admitted(source, target, 64), [16, 64, 1024])
        self.assertEqual(self._admitted(source, target, 4096), [4096])


if __name__ == "__main__":
    run_tests()
