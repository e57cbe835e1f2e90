# Owner(s): ["oncall: distributed"]
"""Plans made ready for a rank."""

from typing import ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from test_exchange import FakeWorld
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from torch_overlay.distributed.tensor._runner import at_hand
from torch_overlay.distributed.tensor._runner.exchange import part
from torch_overlay.distributed.tensor._runner.program import Program, make_program
from torch_overlay.distributed.tensor._runner.question import Question
from torch_overlay.distributed.tensor._runner.specs import gathers_step_by_step, same_step_by_step


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

    def test_a_norm(self) -> None:
        whole, norm = torch.arange(15.0).reshape(5, 3), _NormPartial(2)
        program = self._program((norm, norm), (Replicate(), Shard(0)))
        program.make_ready(self.mesh)
        wanted = program.after.box(tuple(self.mesh.get_coordinate()))
        moved = program.run(whole * (self.rank + 1), self.mesh)
        self.assertEqual(moved, part(whole * (1 + 4 + 9 + 16) ** 0.5, wanted))

    def test_replicas_become_terms_of_a_norm(self) -> None:
        whole = torch.arange(1.0, 16.0).reshape(5, 3)
        for order in (1, 2, 3, 0.5, -1):
            norm = _NormPartial(norm_type=order)
            for source, targets in (
                ((Replicate(), Replicate()), ((norm, norm), (Shard(0), norm))),
                ((norm, Replicate()), ((norm, norm),)),
                ((norm, Shard(0)), ((norm, Shard(1)),)),
            ):
                for target in targets:
                    made, ended = (self._program(*ends) for ends in ((source, target), (target, (Replicate(),) * 2)))
                    made.make_ready(self.mesh)
                    ended.make_ready(self.mesh)
                    local = part(whole, made.held) * (1 if source[0].is_replicate() else 2 ** (-1 / order))
                    result = ended.run(made.run(local, self.mesh), self.mesh)
                    self.assertEqual(result, whole, msg=f"{order}: {made.text}, {ended.text}")

    def test_what_goes_on_later_is_reduced_at_once(self) -> None:
        """A large reduce-scatter runs in rounds, which are waited for."""
        ends = (Partial(), Partial()), (Shard(0), Shard(1))
        rounds = []
        for async_op in (False, True):
            program = self._program(*ends, shape=(1 << 13, 1 << 13), async_op=async_op)
            rounds.append(max(step.rounds for step in program.steps if isinstance(step, ReduceScatter)))
        self.assertGreater(rounds[0], 1)
        self.assertEqual(rounds[1], 1)


class TestOtherBackends(FakeWorld):
    def test_a_plan_has_only_what_runs_step_by_step(self) -> None:
        """There no all-to-all runs on the CPU; shards are gathered."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        meta = TensorMeta(torch.Size((8, 8)), (8, 1), torch.float32)

        def program(*ends: tuple[Placement, ...]) -> Program:
            specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in ends]
            return make_program(Question.of(mesh, *specs, meta.shape, meta.dtype), mesh)

        with mock.patch.object(at_hand, "has_known_backends", return_value=False):
            steps = program((Shard(0), Shard(1)), (Replicate(), Shard(1))).steps
            self.assertEqual([type(step) for step in steps], [AllGather])
            for source, target in (
                ((Shard(0), Replicate()), (Shard(1), Replicate())),
                ((Partial(), Shard(0)), (Replicate(), Shard(1))),
            ):
                with self.assertRaisesRegex(NotPlanned, "isn't built in"):
                    program(source, target)


class TestWaitedFor(FakeWorld):
    ranks = 8

    def test_a_reduction_before_a_gather_keeps_its_rounds(self) -> None:
        """It is waited for in any case, and in one round it takes more memory."""
        with config.patch(mesh_share_groups="names", mesh_joint_groups="whole"):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
            for names in (("a", "b"), ("a", "c"), ("b", "c")):
                mesh[names]._flatten("".join(names))
            meta = TensorMeta(torch.Size((1 << 13, 1 << 13)), (1 << 13, 1), torch.float32)
            ends = (Shard(0), Partial(), Partial()), (Replicate(), Replicate(), Shard(1))
            specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in ends]
            asked = [Question.of(mesh, *specs, meta.shape, meta.dtype, later) for later in (False, True)]
            programs = [make_program(question, mesh) for question in asked]
        self.assertEqual(programs[0].steps, programs[1].steps)
        self.assertEqual([type(step) for step in programs[0].steps], [ReduceScatter, AllGather])
        self.assertGreater(programs[0].steps[0].rounds, 1)


class TestGone(FakeWorld):
    def test_a_group_that_is_gone_is_named(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        meta = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
        ends = ((Replicate(), Shard(0)), (Replicate(), Replicate()))
        specs = [DTensorSpec(mesh, end, tensor_meta=meta) for end in ends]
        program = make_program(Question.of(mesh, *specs, (4, 3), torch.float32), mesh)
        program.make_ready(mesh)
        dist.destroy_process_group(mesh.get_group("b"))
        with self.assertRaisesRegex(RuntimeError, "the process group over b of .* is gone"):
            program.run(torch.ones(2, 3), mesh)


class TestRefused(FakeWorld):
    """On a 2 x 2 mesh that is flattened."""

    settings: ClassVar[dict[str, object]] = {"mesh_share_groups": "names"}

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        self.mesh._flatten("ab")

    def _program(self, source, target, dtype, shape=(4, 4)) -> Program:
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), dtype)
        specs = [DTensorSpec(self.mesh, end, tensor_meta=meta) for end in (source, target)]
        return make_program(Question.of(self.mesh, *specs, shape, dtype), self.mesh)

    def test_averages_of_whole_numbers(self) -> None:
        terms, replicas = (Partial("avg"), Replicate()), (Replicate(), Replicate())
        """They are sums, which are exact, and divided at the end."""
        averaged = [
            self._program(terms, replicas, dtype).averaged for dtype in (torch.int64, torch.bool, torch.float32)
        ]
        self.assertEqual(averaged, [2, 2, 0])
        self.assertEqual(self._program(terms, terms, torch.int64).averaged, 0, "nothing ends")

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


class TestSameSteps(TestCase):
    """No bytes move."""

    def _asked(self, source: Placement, target: Placement, dtype=torch.float32) -> Question:
        return Question(None, (source,), (target,), (type(source), type(target)), (), (), (6, 6), dtype)

    def test_one_collective_over_one_even_dim_is_the_same_step_by_step(self) -> None:
        rows, columns, replicas = (Regions.of((dim,), (None,), (6, 6), (3,)) for dim in (0, 1, None))
        pending = Regions.of((None,), ("sum",), (6, 6), (3,))
        for step, source, target, on_cpu in (
            (AllGather(rows, replicas, (0,)), Shard(0), Replicate(), True),
            (AllReduce(pending, replicas, (0,), "sum"), Partial(), Replicate(), True),
            (ReduceScatter(pending, columns, (0,), "sum"), Partial(), Shard(1), True),
            (AllToAll(rows, columns, (0,)), Shard(0), Shard(1), False),
        ):
            asked = self._asked(source, target)
            self.assertEqual(same_step_by_step([step], asked, "cpu"), on_cpu, msg=f"{step}")
            self.assertTrue(same_step_by_step([step], asked, "cuda"), msg=f"{step}")
            self.assertFalse(same_step_by_step([step, step], asked, "cuda"))
        gather = AllGather(rows, replicas, (0,))
        self.assertFalse(same_step_by_step([gather], self._asked(Shard(0), Replicate(), torch.int16), "cpu"))
        uneven = AllGather(*(Regions.of((dim,), (None,), (7, 4), (3,)) for dim in (0, None)), (0,))
        self.assertFalse(same_step_by_step([uneven], self._asked(Shard(0), Replicate()), "cuda"))


class TestCopies(FakeWorld):
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

    def test_a_mesh_dim_of_one_rank_that_goes_or_comes(self) -> None:
        """From the outer one on, the step-by-step path gathers both; from the inner one on, only that."""
        rows = (Shard(0), Shard(0))
        self._check((1, 4), rows, (Replicate(), Shard(0)), True)
        self._check((4, 1), rows, (Shard(0), Replicate()), False)
        self._check((1, 4), (Replicate(), Shard(0)), rows, True)
        self._check((4, 1), (Shard(0), Replicate()), rows, False)


if __name__ == "__main__":
    run_tests()
