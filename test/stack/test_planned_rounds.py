# Owner(s): ["oncall: distributed"]
"""An exchange in rounds gives what one in one piece gives, and holds less in each."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import Place, part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll
from torch_overlay.distributed.tensor._rounds import all_to_all_in_rounds


class TestRoundsRun(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def test_rows_to_columns(self) -> None:
        mesh = init_device_mesh("cpu", (4,))
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order=True)
        for shape in ((8, 8), (5, 7), (1, 3), (9, 2)):
            for rounds in (1, 2, 4):
                whole = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
                before, after = (Regions.of((dim,), (None,), shape, (4,)) for dim in (0, 1))
                held, wanted = before.box((self.rank,)), after.box((self.rank,))
                step, place = AllToAll(before, after, (0,), rounds=rounds), Place((self.rank,), held, wanted)
                with CommDebugMode() as counted:
                    moved = all_to_all_in_rounds(step, place, group)(part(whole, held))
                self.assertEqual(moved, part(whole, wanted), msg=f"{shape} in {rounds} rounds on rank {self.rank}")
                self.assertEqual(counted.get_total_counts(), rounds, msg="ranks that have nothing take part, too")

    def test_sums(self) -> None:
        mesh = init_device_mesh("cpu", (4,))
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order=True)
        whole = torch.arange(64.0).reshape(8, 8)
        pending = Regions.of((None,), ("sum",), (8, 8), (4,))
        for dim in (0, 1):
            parts = Regions.of((dim,), (None,), (8, 8), (4,))
            place = Place((self.rank,), pending.box((self.rank,)), parts.box((self.rank,)))
            step = AllToAll(pending, parts, (0,), "sum", (0,), rounds=2)
            with CommDebugMode() as counted:
                summed = all_to_all_in_rounds(step, place, group)(whole * (self.rank + 1))
            self.assertEqual(summed, part(whole * 10, place.wanted), msg=f"{dim} on rank {self.rank}")
            self.assertEqual(counted.get_total_counts(), 2)


if __name__ == "__main__":
    run_tests()
