# Owner(s): ["oncall: distributed"]
"""A program runs a plan on one rank, as often as it is asked to."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._pack import part
from torch_overlay.distributed.tensor._planner.steps import AllGather, ReduceScatter
from torch_overlay.distributed.tensor._program import Program, make_program
from torch_overlay.distributed.tensor._question import Question


class TestProgram(DTensorOpTestBase):
    """Four threads play the ranks of a 2 x 2 mesh whose dims are flattened."""

    @property
    def world_size(self) -> int:
        return 4

    def _program(self, source, target, shape=(5, 3), async_op=False) -> Program:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        self.mesh._flatten("ab")
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
        specs = [DTensorSpec(self.mesh, end, tensor_meta=meta) for end in (source, target)]
        return make_program(Question.of(self.mesh, *specs, shape, torch.float32, async_op), self.mesh)

    def test_a_move_and_a_reduction(self) -> None:
        whole = torch.arange(15.0).reshape(5, 3) * 4
        for source, target in (
            ((Shard(0), Shard(0)), (Shard(1), Replicate())),
            ((Partial(), Partial()), (Replicate(), Shard(0))),
        ):
            program = self._program(source, target)
            program.make_ready(self.mesh)
            terms = 4 if source[0].is_partial() else 1
            place = tuple(self.mesh.get_coordinate())
            for _ in range(2):
                moved = program.run(part(whole, program.held) / terms, self.mesh)
                self.assertEqual(moved, part(whole, program.after.box(place)), msg=f"{program.text} at {place}")

    def test_a_norm(self) -> None:
        whole, norm = torch.arange(15.0).reshape(5, 3), _NormPartial(2)
        program = self._program((norm, norm), (Replicate(), Shard(0)))
        program.make_ready(self.mesh)
        wanted = program.after.box(tuple(self.mesh.get_coordinate()))
        moved = program.run(whole * (self.rank + 1), self.mesh)
        self.assertEqual(moved, part(whole * (1 + 4 + 9 + 16) ** 0.5, wanted))

    def test_what_goes_on_later_is_reduced_at_once(self) -> None:
        """A large reduce-scatter runs in rounds, which are waited for."""
        ends = (Partial(), Partial()), (Shard(0), Shard(1))
        rounds = []
        for async_op in (False, True):
            program = self._program(*ends, shape=(1 << 13, 1 << 13), async_op=async_op)
            rounds.append(max(step.rounds for step in program.steps if isinstance(step, ReduceScatter)))
        self.assertGreater(rounds[0], 1)
        self.assertEqual(rounds[1], 1)


class TestWaitedFor(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def test_a_reduction_before_a_gather_keeps_its_rounds(self) -> None:
        """It is waited for in any case, and in one round it takes more memory."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        with config.patch(mesh_share_groups="names", mesh_joint_groups="create"):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
            meta = TensorMeta(torch.Size((1 << 13, 1 << 13)), (1 << 13, 1), torch.float32)
            ends = (Shard(0), Partial(), Partial()), (Replicate(), Replicate(), Shard(1))
            specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in ends]
            asked = [Question.of(mesh, *specs, meta.shape, meta.dtype, later) for later in (False, True)]
            found = [make_program(question, mesh) for question in asked]
        self.assertEqual(found[0].steps, found[1].steps)
        self.assertEqual([type(step) for step in found[0].steps], [ReduceScatter, AllGather])
        self.assertGreater(found[0].steps[0].rounds, 1)


class TestGone(TestCase):
    """In a world of 4 of which this process plays one; no bytes move."""

    def test_a_group_that_is_gone_is_named(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        meta = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
        ends = ((Replicate(), Shard(0)), (Replicate(), Replicate()))
        specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in ends]
        program = make_program(Question.of(mesh, *specs, (4, 3), torch.float32), mesh)
        program.make_ready(mesh)
        dist.destroy_process_group(mesh.get_group("b"))
        with self.assertRaisesRegex(RuntimeError, "the process group over b of .* is gone"):
            program.run(torch.ones(2, 3), mesh)


if __name__ == "__main__":
    run_tests()
