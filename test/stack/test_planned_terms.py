# Owner(s): ["oncall: distributed"]
"""An all-to-all brings each rank the terms of its box, and it adds them."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor._exchange import all_to_all
from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import Place, part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll


class TestTerms(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _exchanged(self, step, place, local) -> torch.Tensor:
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        pack, exchange, land = all_to_all(step, place, group, torch.ops._c10d_functional.wait_tensor)
        return land(exchange(pack(local)))

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
