# Owner(s): ["oncall: distributed"]
"""Root meshes with their views are told apart, alike on all ranks."""

import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._universe import current_world


class TestUniverses(TestCase):
    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def test_universes_are_numbered_alike_on_all_ranks(self) -> None:
        world, ranks = current_world(), RankMap.identity(8)
        one, other = (world.open_universe(ranks) for _ in range(2))
        self.assertEqual([one.number, other.number], [1, 2])
        self.assertEqual(world.open_universe(RankMap([1, 0])).number, 1, msg="over other ranks")
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.assertIsNot(current_world(), world)


if __name__ == "__main__":
    run_tests()
