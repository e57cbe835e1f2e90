# Owner(s): ["oncall: distributed"]
"""A group for redistributions over several axes serves no axis."""

import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed._process_groups import Request, axis_group
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._universe import current_world
from torch_overlay.distributed._view import View


class TestJointRequests(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    @config.patch(mesh_share_groups="names")
    def test_a_joint_group_is_neither_an_axis_nor_the_default_group(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        ranks = RankMap.identity(8)
        universe = current_world().open_universe(ranks)

        def asked(size: int, name: str, joint: bool):
            view = View(ranks, _MeshLayout.from_sizes_strides((8 // size, size)).select((1,)))
            return axis_group(universe, Request(view, name, (None, None), "cpu", joint=joint))

        group = asked(4, "b,c", True)
        self.assertEqual(asked(4, "y,z", True), group, msg="whatever its dims are called")
        self.assertIsNot(asked(8, "a,b,c", True), dist.group.WORLD)
        self.assertFalse(any(entry.serves_axis for entry in universe.table.entries.values()))
        self.assertNotEqual(asked(4, "b,c", False), group)


if __name__ == "__main__":
    run_tests()
