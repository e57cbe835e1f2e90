# Owner(s): ["oncall: distributed"]
"""What a layout over a rank map shows each rank."""

import itertools

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._view import View


class TestRankViews(TestCase):
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


if __name__ == "__main__":
    run_tests()
