# Owner(s): ["oncall: distributed"]
"""What only a backend can reduce is left to it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._planner.regions import NotPlanned
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Collective, ReduceScatter
from torch_overlay.distributed.tensor._program import Program, make_program
from torch_overlay.distributed.tensor._question import Question


class TestRefused(TestCase):
    """On a 2 x 2 mesh that is flattened, in a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        shared = config.patch(mesh_share_groups="names")
        shared.__enter__()
        self.addCleanup(shared.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        self.mesh._flatten("ab")

    def _program(self, source, target, dtype, shape=(4, 4)) -> Program:
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), dtype)
        specs = [DTensorSpec(self.mesh, end, tensor_meta=meta) for end in (source, target)]
        return make_program(Question.of(self.mesh, *specs, shape, dtype), self.mesh)

    def test_averages_of_whole_numbers(self) -> None:
        terms, replicas = (Partial("avg"), Replicate()), (Replicate(), Replicate())
        with self.assertRaisesRegex(NotPlanned, "an average of whole numbers"):
            self._program(terms, replicas, torch.int64)
        self._program(terms, replicas, torch.float32)
        self._program(terms, terms, torch.int64)  # nothing ends

    def test_complex_numbers_have_no_order(self) -> None:
        for op in ("max", "min", "product", "sum"):
            ends = (Partial(op), Replicate()), (Replicate(), Replicate())
            if op == "sum":
                self._program(*ends, torch.complex64)
                continue
            with self.assertRaisesRegex(NotPlanned, "complex numbers"):
                self._program(*ends, torch.complex64)

    def test_terms_that_a_rank_would_add(self) -> None:
        ends = (Shard(0), Partial("sum")), (Shard(1), Shard(1))
        self.assertTrue(all(step.op == "sum" for step in self._program(*ends, torch.float32).steps))
        for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex32):
            with self.assertRaisesRegex(NotPlanned, "only a backend reduces"):
                self._program(*ends, dtype)

    def test_what_is_refused_is_so_for_all_sizes(self) -> None:
        """With the joint group the last two cases have other plans; compiled code may have one program for both."""
        for source, target, rows, kinds in (
            ((Partial(), Replicate()), (Shard(0), Replicate()), 4, [ReduceScatter]),
            ((Partial(), Shard(0)), (Shard(0), Shard(0)), 64, [AllToAll]),
            ((Partial(), Shard(0)), (Shard(0), Shard(0)), 4096, [ReduceScatter, AllToAll]),
        ):
            added = self._program(source, target, torch.uint8, (rows, rows))
            self.assertEqual([type(step) for step in added.steps if isinstance(step, Collective)], kinds)
            with self.assertRaisesRegex(NotPlanned, "only a backend reduces"):
                self._program(source, target, torch.float8_e5m2, (rows, rows))
        self._program((Shard(0), Partial()), (Shard(1), Partial()), torch.float8_e5m2)  # nothing ends


if __name__ == "__main__":
    run_tests()
