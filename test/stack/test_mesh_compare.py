# Owner(s): ["oncall: distributed"]
"""What ranks that build different meshes, or have other settings, are told."""

import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh import compare
from torch_overlay.distributed._mesh.rank_map import RankMap


class TestCompare(TestCase):
    """What the rank says that reads the lines of all."""

    def _verdict(self, *lines: str) -> str:
        store = dist.HashStore()
        for rank, line in enumerate(lines):
            store.set(f"mesh_line/{rank}", line)
        return compare._verdict(compare.who_builds(store, range(len(lines))))

    def test_all_the_same(self) -> None:
        self.assertEqual(self._verdict("x=1\n0-1 1 (a=2)", "x=1\n2-3 1 (b=2)\n0-1 2 (a=2)"), "same")

    def test_a_rank_that_differs_is_named(self) -> None:
        said = self._verdict("x=1\n0-2 1 (a=3)", "x=1\n0-2 1 (b=3)", "x=1\n0-2 1 (a=3)")
        self.assertIn("ranks 0, 2 build (a=3); rank 1 builds (b=3)", said)

    def test_a_rank_with_other_settings_is_named(self) -> None:
        said = self._verdict("x=1\n0-2 1 (a=3)", "x=2\n0-2 1 (a=3)", "x=1\n0-2 1 (a=3)")
        self.assertIn("with the same settings, and they differ: ranks 0, 2 run x=1; rank 1 runs x=2", said)


class TestCompareRanks(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    @config.patch(mesh_check=True)
    def test_ranks_that_build_different_meshes_are_told(self) -> None:
        rank, ranks = dist.get_rank(), RankMap.identity(2)
        compare.leave_line(lambda: "(dp=2)", ranks)
        compare.check_same_mesh()
        compare.leave_line(lambda: f"({'ab'[rank]}=2)", ranks)
        said = rf"0 builds \(a=2\); rank 1 builds \(b=2\)\. This rank, {rank}, builds \({'ab'[rank]}"
        with self.assertRaisesRegex(RuntimeError, said):
            compare.check_same_mesh()


if __name__ == "__main__":
    run_tests()
