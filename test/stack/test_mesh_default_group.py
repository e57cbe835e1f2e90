# Owner(s): ["oncall: distributed"]
"""An axis that is the whole world has the default group."""

import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed._process_groups import Request, axis_group
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._universe import current_world
from torch_overlay.distributed._view import View


class TestDefaultGroup(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def _has_it(self, ranks, override=(None, None)) -> bool:
        universe = current_world().open_universe(RankMap(ranks))
        view = View(RankMap(ranks), _MeshLayout.from_sizes_strides((len(ranks),)))
        return axis_group(universe, Request(view, "world", override, "cpu")) is dist.group.WORLD

    def test_an_axis_over_the_world_has_the_default_group(self) -> None:
        self.assertTrue(self._has_it(range(8)))
        self.assertFalse(self._has_it([1, 0, *range(2, 8)]), msg="in another order")
        self.assertFalse(self._has_it(range(2, 6)), msg="over some ranks")
        self.assertFalse(self._has_it(range(8), ("fake", None)), msg="on a backend that was asked for")


if __name__ == "__main__":
    run_tests()
