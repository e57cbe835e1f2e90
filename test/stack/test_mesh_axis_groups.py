# Owner(s): ["oncall: distributed"]
"""The group of an axis is looked up, else made by its members, in the order of the mesh."""

from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed._process_groups import Request, axis_group
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._universe import current_world
from torch_overlay.distributed._view import View


class TestAxisGroups(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_on = config.patch(mesh_share_groups="names")
        switched_on.__enter__()
        self.addCleanup(switched_on.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        patched = mock.patch.object(distributed_c10d, "new_group", wraps=distributed_c10d.new_group)
        self.made = patched.start()
        self.addCleanup(patched.stop)

    def _asked(self):
        return [list(call.kwargs["ranks"]) for call in self.made.call_args_list]

    def _axis(self, ranks, name="tp") -> Request:
        """The inner axis, of four, of a mesh over these ranks."""
        layout = _MeshLayout.from_sizes_strides((len(ranks) // 4, 4)).select((1,))
        return Request(View(RankMap(ranks), layout), name, (None, None), "cpu")

    def _group(self, universe, request):
        return getattr(axis_group(universe, request), "group_name", None)

    def test_members_make_it_once(self) -> None:
        universe = current_world().open_universe(RankMap.identity(8))
        first = self._group(universe, self._axis(range(8)))
        self.assertEqual(self._asked(), [[4, 5, 6, 7]])
        self.assertEqual(self._group(universe, self._axis(range(8))), first)
        self.assertEqual(self.made.call_count, 1)
        self.assertNotEqual(self._group(universe, self._axis(range(8), "ep")), first)
        other = current_world().open_universe(RankMap.identity(8))
        self.assertNotEqual(self._group(other, self._axis(range(8))), first, msg="another universe")

    @config.patch(mesh_create_groups="world")
    def test_all_ranks_of_the_world_make_it_if_asked(self) -> None:
        universe = current_world().open_universe(RankMap.identity(8))
        self._group(universe, self._axis(range(8)))
        self.assertEqual(self._asked(), [[0, 1, 2, 3], [4, 5, 6, 7]])

    def test_it_keeps_the_order_of_the_mesh(self) -> None:
        ranks = [7, 6, 5, 4, 3, 2, 1, 0]
        universe = current_world().open_universe(RankMap(ranks))
        group = axis_group(universe, self._axis(ranks))
        self.assertEqual(dist.get_process_group_ranks(group), [7, 6, 5, 4])

    def test_a_rank_outside_has_none_and_makes_none(self) -> None:
        universe = current_world().open_universe(RankMap([0, 1, 2, 3]))
        self.assertIsNone(axis_group(universe, self._axis([0, 1, 2, 3])))
        self.made.assert_not_called()

    def test_one_that_members_destroyed_is_made_again(self) -> None:
        universe = current_world().open_universe(RankMap.identity(8))
        first = axis_group(universe, self._axis(range(8)))
        dist.destroy_process_group(first)
        again = axis_group(universe, self._axis(range(8)))
        self.assertEqual(dist.get_process_group_ranks(again), [4, 5, 6, 7])


if __name__ == "__main__":
    run_tests()
