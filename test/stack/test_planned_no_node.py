# Owner(s): ["oncall: distributed"]
"""A redistribution makes a node of autograd only where a gradient can be asked for."""

from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._redistribute import Redistribute
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestNoNode(TestCase):
    """In a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        self.addCleanup(torch.distributed.destroy_process_group)
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


if __name__ == "__main__":
    run_tests()
