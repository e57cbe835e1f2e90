# Owner(s): ["oncall: distributed"]
"""Of a large all-to-all a rank's own part stays where it is."""

from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor import _pack
from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._own_part import Apart, all_to_all_by_size
from torch_overlay.distributed.tensor._pack import Place, part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll


class TestOwnPart(DTensorOpTestBase):
    """Four threads play the ranks; every message counts as large."""

    @classmethod
    def setUpClass(cls) -> None:  # once, since a thread that ended would take it from the others
        super().setUpClass()
        large = mock.patch.object(_pack, "LARGE", 0)
        large.start()
        cls.addClassCleanup(large.stop)

    @property
    def world_size(self) -> int:
        return 4

    def _exchanged(self, step, place, local) -> torch.Tensor:
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        pack, exchange, land = all_to_all_by_size(step, place, group, torch.ops._c10d_functional.wait_tensor)
        packed = pack(local)
        if step.before.shape == (8, 8):  # else some ranks have nothing for others
            self.assertIsInstance(packed, Apart)
        return land(exchange(packed))

    def test_rows_to_columns(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3), (9, 2)):
            for dtype in (torch.float32, torch.int16):  # whole, and as bytes
                whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
                before, after = (Regions.of((dim,), (None,), shape, (4,)) for dim in (0, 1))
                held, wanted = before.box((self.rank,)), after.box((self.rank,))
                moved = self._exchanged(
                    AllToAll(before, after, (0,)), Place((self.rank,), held, wanted), part(whole, held)
                )
                self.assertEqual(moved, part(whole, wanted), msg=f"{shape} on rank {self.rank}")

    def test_terms_are_added(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3)):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            pending, rows = Regions.of((None,), ("sum",), shape, (4,)), Regions.of((0,), (None,), shape, (4,))
            held, wanted = pending.box((self.rank,)), rows.box((self.rank,))
            step, place = AllToAll(pending, rows, (0,), "sum", (0,)), Place((self.rank,), held, wanted)
            moved = self._exchanged(step, place, whole * (self.rank + 1))
            self.assertEqual(moved, part(whole * 10, wanted), msg=f"{shape} on rank {self.rank}")


if __name__ == "__main__":
    run_tests()
