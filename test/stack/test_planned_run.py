# Owner(s): ["oncall: distributed"]
"""Steps run on one rank after the other give each rank the box that they lead to."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll, Narrow
from torch_overlay.distributed.tensor._run import runners


class TestRunners(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _regions(self, dim, shape) -> Regions:
        return Regions.of((dim,), (None,), shape, (4,))

    def _moved(self, steps, local) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (4,))
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order=True)
        place = (self.rank,)
        held = steps[0].before.box(place)
        for function in runners(steps, place, held, lambda axes: group):
            local = function(local)
        return local

    def test_moves(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3)):
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            replicas, rows, columns = (self._regions(dim, shape) for dim in (None, 0, 1))
            for steps in (
                [Narrow(replicas, rows)],
                [AllToAll(rows, columns, (0,))],
                [AllToAll(rows, columns, (0,), rounds=2)],
                [Narrow(replicas, columns), AllToAll(columns, rows, (0,))],
            ):
                held, wanted = steps[0].before.box((self.rank,)), steps[-1].after.box((self.rank,))
                self.assertEqual(self._moved(steps, part(whole, held)), part(whole, wanted), msg=f"{shape}: {steps}")


if __name__ == "__main__":
    run_tests()
