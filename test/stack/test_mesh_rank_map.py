# Owner(s): ["oncall: distributed"]
"""The ranks of all meshes of one root, stored once, and what a layout shows each of them."""

import itertools
import sys

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._view import View


class TestRankMap(TestCase):
    def test_from_index_to_rank_and_back(self) -> None:
        for ranks in ([0, 1, 2, 3], [3, 1, 2, 0], [8, 9, 4], []):
            stored = RankMap(ranks)
            self.assertEqual([stored[index] for index in range(len(ranks))], ranks)
            self.assertEqual([stored.index(rank) for rank in ranks], list(range(len(ranks))))
            self.assertIsNone(stored.index(7))
            self.assertEqual(stored, RankMap(ranks))
        self.assertNotEqual(RankMap([0, 1, 2]), RankMap([0, 2, 1]))

    def test_ranks_in_order_take_no_memory(self) -> None:
        large, small = (sum(map(sys.getsizeof, vars(RankMap.identity(n)).values())) for n in (1 << 20, 64))
        self.assertEqual(large, small)

    def test_a_rank_stands_there_once(self) -> None:
        with self.assertRaisesRegex(ValueError, "must not contain duplicate entries"):
            RankMap([0, 2, 0])

    def test_each_rank_sees_its_own_copy_of_a_layout(self) -> None:
        shape, order = (2, 3, 2), [5, 2, 7, 0, 3, 6, 1, 4, 11, 10, 8, 9]
        for ranks in (range(12), order):
            whole = torch.tensor(list(ranks)).reshape(shape)
            layout = _MeshLayout.from_sizes_strides(shape)
            for axes in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
                view = View(RankMap(ranks), layout.select(axes))
                for place in itertools.product(*map(range, shape)):
                    rank = int(whole[place])
                    picked = whole[tuple(slice(None) if axis in axes else place[axis] for axis in range(3))]
                    self.assertEqual(view.ranks(rank), picked.flatten().tolist(), msg=f"{axes} of rank {rank}")
                    self.assertEqual(view.coordinate(rank), tuple(place[axis] for axis in axes))
                    elsewhere = view.window(view.layout, view.start(rank))
                    self.assertEqual(elsewhere.ranks(99), view.ranks(rank), msg="as another rank sees it")


if __name__ == "__main__":
    run_tests()
