# Owner(s): ["oncall: distributed"]
"""An all-to-all of boxes brings each rank its box, evenly cut or not."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed.tensor._exchange import all_to_all
from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import Place, part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll


class TestExchange(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _exchanged(self, step, place, local) -> torch.Tensor:
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        pack, exchange, land = all_to_all(step, place, group, torch.ops._c10d_functional.wait_tensor)
        return land(exchange(pack(local)))

    def test_rows_to_columns(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3), (9, 2)):
            for dtype in (torch.float32, torch.int16):  # whole, and as bytes
                whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
                before, after = (Regions.of((dim,), (None,), shape, (4,)) for dim in (0, 1))
                held, wanted = before.box((self.rank,)), after.box((self.rank,))
                step, place = AllToAll(before, after, (0,)), Place((self.rank,), held, wanted)
                moved = self._exchanged(step, place, part(whole, held))
                self.assertEqual(moved, part(whole, wanted), msg=f"{shape} on rank {self.rank}")


class TestNothingToSend(TestCase):
    """In a world of 4 of which this process plays the last; no bytes move."""

    def test_a_rank_that_only_receives(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        rows, columns = (Regions.of((dim,), (None,), (1, 4), (4,)) for dim in (0, 1))
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        place = Place((3,), rows.box((3,)), columns.box((3,)))
        step = AllToAll(rows, columns, (0,))
        pack, exchange, land = all_to_all(step, place, group, torch.ops._c10d_functional.wait_tensor)
        self.assertEqual(land(exchange(pack(torch.ones(0, 4)))).shape, (1, 1))


if __name__ == "__main__":
    run_tests()
