# Owner(s): ["oncall: distributed"]
"""Where the step-by-step path cuts or gathers, the result is a tensor of its own."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed.tensor._program import make_program
from torch_overlay.distributed.tensor._question import Question
from torch_overlay.distributed.tensor._specs import gathers_step_by_step


class TestCopies(TestCase):
    """On meshes of 4, in a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)

    def _check(self, sizes, source, target, gathers: bool) -> None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
        meta = TensorMeta(torch.Size((8, 2)), (2, 1), torch.float32)
        specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in (source, target)]
        question = Question.of(mesh, *specs, (8, 2), torch.float32)
        self.assertEqual(gathers_step_by_step(question), gathers)
        program, local = make_program(question, mesh), torch.ones(2, 2)
        program.make_ready(mesh)
        self.assertEqual(program.run(local, mesh).data_ptr() != local.data_ptr(), gathers)

    def test_a_cut_keeps_nothing_of_the_whole(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        meta = TensorMeta(torch.Size((4, 6)), (6, 1), torch.float32)
        ends = ((Replicate(), Replicate()), (Shard(0), Shard(1)))
        specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in ends]
        program = make_program(Question.of(mesh, *specs, (4, 6), torch.float32), mesh)
        program.make_ready(mesh)
        cut = program.run(torch.ones(4, 6), mesh)
        self.assertEqual(cut.untyped_storage().nbytes(), cut.numel() * 4)

    def test_a_mesh_dim_of_one_rank_that_goes(self) -> None:
        """From the outer one on, the step-by-step path gathers both; from the inner one on, only that."""
        rows = (Shard(0), Shard(0))
        self._check((1, 4), rows, (Replicate(), Shard(0)), True)
        self._check((4, 1), rows, (Shard(0), Replicate()), False)

    def test_one_that_comes(self) -> None:
        rows = (Shard(0), Shard(0))
        self._check((1, 4), (Replicate(), Shard(0)), rows, True)
        self._check((4, 1), (Shard(0), Replicate()), rows, False)


if __name__ == "__main__":
    run_tests()
