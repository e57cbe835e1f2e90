# Owner(s): ["oncall: distributed"]
"""What can't make a mesh is refused."""

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed._mesh_input import read_mesh, read_names, read_sizes


class TestMeshArguments(TestCase):
    def test_ranks_are_whole_numbers_each_once(self) -> None:
        self.assertEqual(read_mesh([[3, 1], [2, 0]]).ranks(3), [3, 1, 2, 0])
        for wrong in ([0, 0], [0, 1.5], [], [[], []], torch.empty(2, device="meta"), [0, 1 << 40]):
            with self.assertRaises(ValueError, msg=f"{wrong}"):
                read_mesh(wrong)

    def test_each_dim_has_a_size_and_a_name(self) -> None:
        self.assertEqual((read_sizes([2, 4]), read_names(["dp", "tp"], 2)), ((2, 4), ("dp", "tp")))
        for size in (0, -1, 2.0, "2"):
            with self.assertRaisesRegex(ValueError, "at least 1"):
                read_sizes((4, size))
        self.assertEqual(read_names((name for name in "ab"), 2), ("a", "b"))
        for wrong in (("dp",), ("dp", [])):
            with self.assertRaises(ValueError):
                read_names(wrong, 2)


if __name__ == "__main__":
    run_tests()
