# Owner(s): ["oncall: distributed"]
"""New groups for a mesh keep its order, and an error says which axis and ranks they were for."""

from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed._process_groups import Request, new_groups
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._view import View


class TestNewGroups(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        view = View(RankMap.identity(8), _MeshLayout.from_sizes_strides((2, 4)).select((1,)))
        self.request = Request(view, "tp", (None, None), "cpu")

    def test_they_keep_the_order_and_one_that_this_rank_is_not_in_is_none(self) -> None:
        other, mine = new_groups(self.request, [[0, 1, 2, 3], [7, 6, 5, 4]], False)
        self.assertIsNone(other)
        self.assertEqual(dist.get_process_group_ranks(mine), [7, 6, 5, 4])
        self.assertEqual(mine.group_desc, "mesh_tp")

    def test_an_error_says_which_axis_and_ranks(self) -> None:
        for error, said in (
            (RuntimeError("late"), "axis 'tp'.*4.*7.*late"),
            (dist.DistStoreError("late"), "axis 'tp'"),
        ):
            with mock.patch.object(distributed_c10d, "new_group", side_effect=error):
                with self.assertRaisesRegex(type(error), said):
                    new_groups(self.request, [[4, 5, 6, 7]], True)
        with mock.patch.object(
            distributed_c10d, "new_group", side_effect=NotImplementedError("who catches it still does")
        ):
            with self.assertRaisesRegex(NotImplementedError, "^who catches"):
                new_groups(self.request, [[4, 5, 6, 7]], True)


if __name__ == "__main__":
    run_tests()
