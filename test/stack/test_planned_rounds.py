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
from torch_overlay.distributed.tensor._rounds import exchanged


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
                step, place = AllToAll(before, after, (0,), rounds=rounds), Place((self.rank,), held, wanted, 4)
                with CommDebugMode() as counted:
                    moved = exchanged(step, place, group)(part(whole, held))
                self.assertEqual(moved, part(whole, wanted), msg=f"{shape} in {rounds} rounds on rank {self.rank}")
                self.assertEqual(counted.get_total_counts(), rounds, msg="ranks that have nothing take part, too")


if __name__ == "__main__":
    run_tests()
