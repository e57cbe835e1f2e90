# Owner(s): ["oncall: distributed"]
"""The spec in which a redistribution ends is made once, and still is a new one for each tensor."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestTargetSpecs(TestCase):
    """In a world of 4 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        self.addCleanup(dist.destroy_process_group)

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
