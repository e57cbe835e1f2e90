# Owner(s): ["oncall: distributed"]
"""Gathers give each rank the whole, at once or when it is first used."""

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import assembled, part
from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Narrow
from torch_overlay.distributed.tensor._run import runners


class TestGathers(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _regions(self, dim, shape) -> Regions:
        return Regions.of((dim,), (None,), shape, (4,))

    def _moved(self, steps, local, async_op=False, in_order=True) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (4,))
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order)
        place = (self.rank,) if len(steps[0].axes) == 1 else divmod(self.rank, 2)
        held = steps[0].before.box(place)
        for function in runners(steps, place, held, lambda axes: group, async_op):
            local = function(local)
        return local

    def test_gathers(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3)):
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            replicas, rows, columns = (self._regions(dim, shape) for dim in (None, 0, 1))
            for steps in (
                [AllGather(rows, replicas, (0,))],
                [AllGather(columns, replicas, (0,))],
                [AllToAll(rows, columns, (0,)), AllGather(columns, replicas, (0,)), Narrow(replicas, rows)],
            ):
                held, wanted = steps[0].before.box((self.rank,)), steps[-1].after.box((self.rank,))
                for in_order in (True, False):  # by operations that compilers know, or box by box
                    moved = self._moved(steps, part(whole, held), in_order=in_order)
                    self.assertEqual(moved, part(whole, wanted), msg=f"{shape}: {steps}, {in_order}")

    def test_gathers_of_two_dims(self) -> None:
        """By one permute where the boxes are alike, else each padded to the largest."""
        for shape in ((8, 8), (5, 7), (1, 3)):
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            blocks, replicas = (Regions.of(dims, (None, None), shape, (2, 2)) for dims in ((0, 1), (None, None)))
            step = AllGather(blocks, replicas, (0, 1))
            self.assertEqual(self._moved([step], part(whole, blocks.box(divmod(self.rank, 2)))), whole, msg=f"{shape}")

    def test_padding_stays_where_it_is_little(self) -> None:
        """A view keeps in memory what it is a view of."""
        pieces = [(0, Box((0, 0), (5, 7)))]
        for padding, is_view in ((5, True), (40, False)):
            flat = torch.arange(35 + padding)
            whole = assembled(flat, pieces, (5, 7))
            self.assertEqual(whole, flat[:35].view(5, 7))
            self.assertEqual(whole.data_ptr() == flat.data_ptr(), is_view)

    def test_types_that_some_backends_do_not_move_travel_as_bytes(self) -> None:
        sent = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
                    sent.append(args[0].dtype)
                return func(*args, **(kwargs or {}))

        rows, replicas = self._regions(0, (8, 8)), self._regions(None, (8, 8))
        for dtype in (torch.int32, torch.int16):
            whole = torch.arange(64).reshape(8, 8).to(dtype)
            with Watch():
                moved = self._moved([AllGather(rows, replicas, (0,))], part(whole, rows.box((self.rank,))))
            self.assertEqual(moved, whole)
        self.assertEqual(sent, [torch.int32, torch.uint8])

    def test_the_last_collective_is_waited_for_later(self) -> None:
        rows, replicas = self._regions(0, (8, 8)), self._regions(None, (8, 8))
        whole = torch.arange(64.0).reshape(8, 8)
        gathered = self._moved([AllGather(rows, replicas, (0,))], part(whole, rows.box((self.rank,))), async_op=True)
        self.assertIsInstance(gathered, AsyncCollectiveTensor)
        self.assertEqual(gathered + 0, whole)

    def test_a_later_dim_is_waited_for_later_behind_dims_of_one(self) -> None:
        """A batch of one: joining its sequence is a view, for which nothing is read."""
        rows, replicas = self._regions(1, (1, 8, 3)), self._regions(None, (1, 8, 3))
        whole = torch.arange(24.0).reshape(1, 8, 3)
        gathered = self._moved([AllGather(rows, replicas, (0,))], part(whole, rows.box((self.rank,))), async_op=True)
        self.assertIsInstance(gathered, AsyncCollectiveTensor)
        self.assertEqual(gathered + 0, whole)


if __name__ == "__main__":
    run_tests()
