# Owner(s): ["oncall: distributed"]
"""Large tensors are packed and unpacked with fewer copies."""

from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor import _pack
from torch_overlay.distributed.tensor._pack import joined, unpacking, unpacking_in_place
from torch_overlay.distributed.tensor._planner.grids import Grid


class TestInPlace(TestCase):
    def test_large_parts_are_copied_once(self) -> None:
        whole = torch.arange(35.0).reshape(5, 7)
        parts = [whole[:, :3], whole[:2, 3:], whole[2:, 3:]]
        expected = torch.cat([part.flatten() for part in parts])
        for large, made in ((_pack.LARGE, 0), (0, 1)):
            with (
                mock.patch.object(_pack, "LARGE", large),
                mock.patch("torch._foreach_copy_", wraps=torch._foreach_copy_) as copied,
            ):
                self.assertEqual(joined(parts), expected)
            self.assertEqual(copied.call_count, made)

    def test_what_autograd_follows_stays(self) -> None:
        asks = torch.ones(4, requires_grad=True)
        with mock.patch.object(_pack, "LARGE", 0):
            self.assertFalse(_pack.is_large(asks, 4))
            with torch.no_grad():
                self.assertTrue(_pack.is_large(asks, 4))

    @parametrize("members", [3, 4])  # with 4 a sorted block has the shape of the block
    @parametrize("large", [_pack.LARGE, 900, 480, 0])
    def test_large_blocks_are_sorted_where_they_are(self, large, members) -> None:
        """There are two blocks of 480 bytes or 640; where only both together are large, they are copied at once."""
        lengths = (2, members, 4, 5)
        grid = Grid(lengths, lengths, (0, 2, 1, 3))
        flat, shape = torch.arange(40 * members), (8, 5 * members)
        expected = unpacking(grid, shape)(flat)
        with mock.patch.object(_pack, "LARGE", large):
            came = unpacking_in_place(grid, shape)(flat)
        self.assertEqual(came, expected)
        self.assertEqual(came.data_ptr() == flat.data_ptr(), large <= 480)


instantiate_parametrized_tests(TestInPlace)


if __name__ == "__main__":
    run_tests()
