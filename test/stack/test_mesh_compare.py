# Owner(s): ["oncall: distributed"]
"""Ranks compare lines over a store."""

from unittest import mock

import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed import _mesh_check


class TestCompare(TestCase):
    """What rank 0 says when the lines of all ranks are in the store."""

    def _verdict(self, lines: dict[int, str], size: int) -> str:
        store = dist.HashStore()
        for rank, line in lines.items():
            store.set(f"mesh/{rank}", line)
        return _mesh_check._verdict(store, "mesh", size, 0.2, _mesh_check.MESH)

    def test_all_the_same(self) -> None:
        self.assertEqual(self._verdict({0: "(a=2)", 1: "(a=2)"}, 2), "same")

    def test_a_rank_that_differs_is_named(self) -> None:
        said = self._verdict({0: "(a=2)", 1: "(b=2)", 2: "(a=2)"}, 3)
        self.assertIn("ranks 0, 2 build (a=2); ranks 1 build (b=2)", said)

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        self.assertIn("ranks 1 didn't come", self._verdict({0: "(a=2)"}, 2))

    def test_a_store_that_is_gone_is_no_rank_that_did_not_come(self) -> None:
        store = mock.Mock()
        store.wait.side_effect = dist.DistNetworkError("gone")
        with self.assertRaisesRegex(dist.DistNetworkError, "gone"):
            _mesh_check._read(store, "mesh/1", 0.2)


class TestCompareRanks(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_every_rank_hears_who_differs(self) -> None:
        _mesh_check._compare("first", "(a=2)", _mesh_check.MESH)
        rank = dist.get_rank()
        line = f"({'ab'[rank]}=2)"
        said = rf"0 build \(a=2\); ranks 1 build \(b=2\)\. This rank, {rank}"
        with self.assertRaisesRegex(RuntimeError, said):
            _mesh_check._compare("second", line, _mesh_check.MESH)


if __name__ == "__main__":
    run_tests()
