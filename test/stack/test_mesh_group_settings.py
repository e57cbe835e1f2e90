# Owner(s): ["oncall: distributed"]
"""Who makes a group of a mesh follows from the world, the backend and the configuration."""

import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._group_makers import makes_communicators, members_create


class TestGroupSettings(TestCase):
    def test_members_make_groups_alone_where_the_backend_lets_them(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        world = dist.group.WORLD
        self.assertTrue(members_create(world, None))
        self.assertFalse(members_create(world, "cpu:mpi,cuda:nccl"))
        self.assertFalse(makes_communicators(world))
        with config.patch(mesh_create_groups="world"):
            self.assertFalse(members_create(world, None))


if __name__ == "__main__":
    run_tests()
