# Owner(s): ["oncall: distributed"]
"""Reduce-scatters run on one rank: by the operations that compilers know, in rounds, by one permute, and padded."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import ReduceScatter
from torch_overlay.distributed.tensor._run import runners
from torch_overlay.distributed.tensor._spelling import scattered


class TestScatterSpelling(TestCase):
    """What goes into a reduce-scatter; no process group."""

    @parametrize("dim", [0, 1])
    def test_a_scatter_leaves_parts_in_a_row(self, dim) -> None:
        whole = torch.arange(36).reshape(6, 6)
        before, after = Regions.of((None,), ("sum",), (6, 6), (3,)), Regions.of((dim,), (None,), (6, 6), (3,))
        step = ReduceScatter(before, after, (0,), "sum")
        for rank in range(3):
            pack = scattered(step, before.box((0,)), after.box((rank,)))
            self.assertEqual(pack(whole).chunk(3)[rank], part(whole, after.box((rank,))))

    def test_uneven_parts_have_no_spelling(self) -> None:
        before, after = Regions.of((None,), ("sum",), (7, 6), (3,)), Regions.of((0,), (None,), (7, 6), (3,))
        step = ReduceScatter(before, after, (0,), "sum")
        self.assertIsNone(scattered(step, before.box((0,)), after.box((0,))))


instantiate_parametrized_tests(TestScatterSpelling)


class TestScattered(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _scattered(self, step, local, coordinate=None) -> torch.Tensor:
        mesh, coordinate = init_device_mesh("cpu", (4,)), coordinate or (self.rank,)
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order=True)
        for function in runners([step], coordinate, step.before.box(coordinate), lambda axes: group):
            local = function(local)
        return local

    def test_rows(self) -> None:
        for shape in ((8, 8), (5, 7)):  # the second by pieces, padded
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            pending = Regions.of((None,), ("sum",), shape, (4,))
            rows = Regions.of((0,), (None,), shape, (4,))
            mine = self._scattered(ReduceScatter(pending, rows, (0,), "sum"), whole)
            self.assertEqual(mine, part(whole * 4, rows.box((self.rank,))))

    def test_equal_pieces_of_two_dims_are_permuted(self) -> None:
        """Over both axes of a 2 x 2 mesh."""
        for shape in ((4, 6), (3, 5)):  # the second by pieces, padded
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            pending = Regions.of((None, None), ("sum", "sum"), shape, (2, 2))
            blocks = Regions.of((0, 1), (None, None), shape, (2, 2))
            mine = self._scattered(ReduceScatter(pending, blocks, (0, 1), "sum"), whole, divmod(self.rank, 2))
            self.assertEqual(mine, part(whole * 4, blocks.box(divmod(self.rank, 2))))

    def test_in_rounds(self) -> None:
        whole = torch.arange(64.0).reshape(8, 8)
        pending = Regions.of((None,), ("sum",), (8, 8), (4,))
        for dim in (0, 1):
            parts = Regions.of((dim,), (None,), (8, 8), (4,))
            with CommDebugMode() as counted:
                summed = self._scattered(ReduceScatter(pending, parts, (0,), "sum", 2), whole * (self.rank + 1))
            self.assertEqual(summed, part(whole * 10, parts.box((self.rank,))), msg=f"{dim} on rank {self.rank}")
            self.assertEqual(counted.get_total_counts(), 2)


if __name__ == "__main__":
    run_tests()
