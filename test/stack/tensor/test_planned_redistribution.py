# Owner(s): ["oncall: distributed"]
"""Redistributions that are planned as a whole."""

import itertools
import random
from unittest import mock

import torch
from test_exchange import FakeWorld
from test_merging import chunk
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import Redistribute, redistribute_local_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor import _redistribute


class TestPlannedMoves(DTensorOpTestBase):
    """Eight threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 8

    def _mesh(self) -> DeviceMesh:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        for names in (("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c")):
            mesh[names]._flatten("".join(names))
        return mesh

    def _check(self, mesh: DeviceMesh, shape, source, target) -> int:
        """The number of collectives, after comparing the values."""
        whole = torch.arange(1.0, 1.0 + shape[0] * shape[1]).reshape(shape)
        coordinate = mesh.get_coordinate()
        local = chunk(whole, source, mesh.shape, coordinate)
        terms = 1
        for placement, size in zip(source, mesh.shape, strict=True):
            terms *= size if placement.is_partial() else 1
        held = DTensor.from_local(
            local / terms, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        with CommDebugMode() as counted:
            moved = held.redistribute(placements=target).to_local()
        expected = chunk(whole, target, mesh.shape, coordinate)
        self.assertEqual(moved, expected, msg=f"{shape}, {source} to {target} at {coordinate}")
        # Under a mode one even collective runs step by step, without it by plan.
        self.assertEqual(held.redistribute(placements=target).to_local(), expected)
        return counted.get_total_counts()

    def _cases(self, kinds, count: int):
        """Pairs of placements, none pending in the target; the same on every rank."""
        targets = [kind for kind in kinds if not kind.is_partial()]
        pairs = list(itertools.product(itertools.product(kinds, repeat=3), itertools.product(targets, repeat=3)))
        return random.Random(0).sample(pairs, count)

    @config.patch(plan_redistribution=True)
    def test_a_move_is_one_collective(self) -> None:
        mesh = self._mesh()
        for source, target in self._cases((Replicate(), Shard(0), Shard(1)), 40):
            self.assertLessEqual(self._check(mesh, (16, 16), source, target), 1, msg=f"{source} to {target}")

    @config.patch(plan_redistribution=True)
    def test_a_reduction_is_two_at_most(self) -> None:
        mesh = self._mesh()
        for source, target in self._cases((Replicate(), Shard(0), Shard(1), Partial()), 40):
            self.assertLessEqual(self._check(mesh, (16, 16), source, target), 2, msg=f"{source} to {target}")

    @config.patch(plan_redistribution=True)
    def test_uneven_and_empty_shards(self) -> None:
        mesh = self._mesh()
        for source, target in self._cases((Replicate(), Shard(0), Shard(1), Partial()), 20):
            for shape in ((5, 3), (1, 7)):
                self._check(mesh, shape, source, target)

    @config.patch(plan_redistribution=True)
    def test_what_becomes_or_stays_terms(self) -> None:
        mesh, whole = self._mesh(), torch.arange(15.0).reshape(5, 3) * 8
        kinds = (Replicate(), Shard(0), Partial())
        pairs = [*itertools.product(itertools.product(kinds, repeat=3), repeat=2)]
        meta = _dtensor_spec.TensorMeta(whole.shape, whole.stride(), whole.dtype)
        for source, target in random.Random(1).sample(pairs, 30):
            local = chunk(whole, source, mesh.shape, mesh.get_coordinate())
            terms = 2 ** sum(placement.is_partial() for placement in source)
            specs = [_dtensor_spec.DTensorSpec(mesh, end, tensor_meta=meta) for end in (source, target)]
            moved = redistribute_local_tensor(local / terms, *specs)
            made = DTensor.from_local(moved, mesh, target, run_check=False, shape=(5, 3), stride=(3, 1))
            self.assertEqual(made.full_tensor(), whole, msg=f"{source} to {target}")

    @config.patch(plan_redistribution=True)
    def test_what_is_waited_for_later(self) -> None:
        mesh, whole = self._mesh(), torch.arange(64.0).reshape(8, 8)
        for source, target in (
            ((Shard(0), Shard(0), Replicate()), (Replicate(), Replicate(), Replicate())),
            ((Replicate(), Partial(), Partial()), (Replicate(), Replicate(), Replicate())),
            ((Shard(0), Shard(0), Replicate()), (Shard(1), Shard(1), Replicate())),
        ):
            local = chunk(whole, source, mesh.shape, mesh.get_coordinate())
            held = DTensor.from_local(local, mesh, source, run_check=False)
            moved = held.redistribute(placements=target, async_op=True)._local_tensor
            self.assertIsInstance(moved, AsyncCollectiveTensor)
            terms = 4 if source[1].is_partial() else 1
            self.assertEqual(moved + 0, terms * chunk(whole, target, mesh.shape, mesh.get_coordinate()))

    @config.patch(plan_redistribution=True)
    def test_gradients_go_back(self) -> None:
        mesh, whole = self._mesh(), torch.arange(64.0).reshape(8, 8)
        for source, target in self._cases((Replicate(), Shard(0), Shard(1)), 10):
            local = chunk(whole, source, mesh.shape, mesh.get_coordinate()).clone().requires_grad_()
            moved = DTensor.from_local(local, mesh, source, run_check=False).redistribute(placements=target).to_local()
            (moved * chunk(whole, target, mesh.shape, mesh.get_coordinate())).sum().backward()
            self.assertEqual(local.grad, local, msg=f"{source} to {target}")

    def _shards(self, mesh: DeviceMesh, whole: torch.Tensor, order) -> torch.Tensor:
        """What this rank holds of rows cut by these mesh dims, outer to inner."""
        for mesh_dim in order:
            whole = whole.chunk(mesh.size(mesh_dim))[mesh.get_local_rank(mesh_dim)]
        return whole

    @config.patch(plan_redistribution=True)
    def test_strided_shards_and_an_order_of_mesh_dims(self) -> None:
        mesh, whole = self._mesh(), torch.arange(32.0).reshape(8, 4)
        meta = _dtensor_spec.TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
        strided = (_StridedShard(0, split_factor=2), Shard(0), Replicate())
        order = (_dtensor_spec.ShardOrderEntry(0, (1, 0)),)
        replicas = _dtensor_spec.DTensorSpec(mesh, (Replicate(),) * 3, tensor_meta=meta)
        for spec in (
            _dtensor_spec.DTensorSpec(mesh, strided, tensor_meta=meta),
            _dtensor_spec.DTensorSpec(mesh, (Shard(0), Shard(0), Replicate()), tensor_meta=meta, shard_order=order),
        ):
            local = self._shards(mesh, whole, (1, 0))
            with CommDebugMode() as counted:
                self.assertEqual(redistribute_local_tensor(local, spec, replicas), whole)
                self.assertEqual(redistribute_local_tensor(whole, replicas, spec), local)
            self.assertEqual(counted.get_total_counts(), 1)

    @config.patch(plan_redistribution=True)
    def test_ranks_that_interleave(self) -> None:
        """A group may sort its ranks, so it may have another order than the mesh."""
        mesh = DeviceMesh("cpu", [[0, 2, 4, 6], [1, 3, 5, 7]], mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        for length in (4, 16):
            self._check(mesh, (length, 2), (Shard(0), Shard(0)), (Replicate(), Replicate()))


class TestWhoRuns(FakeWorld):
    @config.patch(plan_redistribution=True)
    def test_one_even_collective_goes_step_by_step_under_a_mode(self) -> None:
        mesh = init_device_mesh("cpu", (4,))
        held = DTensor.from_local(torch.ones(8, 2), mesh, (Shard(1),), run_check=False)
        uneven = DTensor.from_local(torch.ones(2, 8), mesh, (Shard(0),), run_check=False, shape=(7, 8), stride=(8, 1))
        by_steps = _redistribute.redistribute_by_steps
        with mock.patch.object(_redistribute, "redistribute_by_steps", wraps=by_steps) as stepped:
            held.redistribute(placements=(Replicate(),))
            self.assertEqual(stepped.call_count, 0)
            with CommDebugMode():
                uneven.redistribute(placements=(Replicate(),))
                self.assertEqual(stepped.call_count, 0)
                held.redistribute(placements=(Replicate(),))
                self.assertEqual(stepped.call_count, 1)

    @config.patch(plan_redistribution=True, mesh_share_groups="names")
    def test_debug_mode_lists_a_plan_as_one_redistribution(self) -> None:
        from torch.utils._debug_mode import DebugMode

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        held = DTensor.from_local(torch.ones(2, 4), mesh, (Shard(0), Shard(0)), run_check=False)
        with DebugMode() as mode:
            held.redistribute(placements=(Shard(1), Shard(1)))
        listed = [line for line in mode.debug_string().splitlines() if "redistribute" in line]
        self.assertEqual(len(listed), 1)
        self.assertIn("trace: S0·S0 → S1·S1: all_to_all(a,b) 24 B", listed[0])


class TestNoNode(FakeWorld):
    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (4,))

    def _forwards(self, held: DTensor) -> int:
        """How often a redistribution runs what makes a node; its result is checked for what a caller sees."""
        made = mock.Mock(wraps=Redistribute.forward)
        with mock.patch.object(Redistribute, "forward", staticmethod(made)):
            moved = held.redistribute(placements=[Replicate()])
        self.assertEqual((moved.placements, moved.shape), ((Replicate(),), held.shape))
        self.assertEqual(moved.requires_grad, held.requires_grad and torch.is_grad_enabled())
        return made.call_count

    def test_one_where_a_gradient_can_be_asked_for(self) -> None:
        held = DTensor.from_local(torch.rand(2, 4), self.mesh, [Shard(0)], run_check=False)
        self.assertEqual(self._forwards(held), 0)
        held = DTensor.from_local(torch.rand(2, 4, requires_grad=True), self.mesh, [Shard(0)], run_check=False)
        self.assertEqual(self._forwards(held), 1)
        with torch.no_grad():
            self.assertEqual(self._forwards(held), 0)

    def test_a_dispatch_mode_sees_it(self) -> None:
        held = DTensor.from_local(torch.rand(2, 4), self.mesh, [Shard(0)], run_check=False)
        with CommDebugMode():
            self.assertEqual(self._forwards(held), 1)

    def test_a_profile_shows_it(self) -> None:
        held = DTensor.from_local(torch.rand(2, 4), self.mesh, [Shard(0)], run_check=False)
        with torch.profiler.profile() as profile:
            held.redistribute(placements=[Replicate()])
        self.assertIn("Redistribute", [event.name for event in profile.events()])

    def test_a_local_tensor_that_asks_counts(self) -> None:
        local = torch.rand(2, 4, requires_grad=True)
        held = DTensor.from_local(local.detach(), self.mesh, [Shard(0)], run_check=False)
        held._local_tensor = local
        self.assertEqual(self._forwards(held), 1)


class TestTargetSpecs(FakeWorld):
    def test_a_second_one_is_not_checked_again(self) -> None:
        mesh = init_device_mesh("cpu", (4,))
        held = [DTensor.from_local(torch.ones(rows, 4), mesh, [Shard(0)], run_check=False) for rows in (2, 3)]
        one = held[0].redistribute(placements=[Replicate()])._spec
        with mock.patch.object(DTensorSpec, "__post_init__") as checked:
            other = held[1].redistribute(placements=[Replicate()])._spec
        self.assertEqual(checked.call_count, 0)
        self.assertEqual((one.placements, one.shape, other.shape), ((Replicate(),), (8, 4), (12, 4)))
        self.assertIs(other.mesh, mesh)

    def test_it_has_the_mesh_that_asked(self) -> None:
        meshes = [init_device_mesh("cpu", (4,)) for _ in range(2)]
        for mesh in meshes:
            held = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
            self.assertIs(held.redistribute(placements=[Replicate()])._spec.mesh, mesh)


if __name__ == "__main__":
    run_tests()
