# Owner(s): ["oncall: distributed"]
"""The ranks of all meshes of one root, stored once."""

import sys

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed._rank_map import RankMap


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


if __name__ == "__main__":
    run_tests()
