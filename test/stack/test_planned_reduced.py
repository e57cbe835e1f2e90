# Owner(s): ["oncall: distributed"]
"""All-reduces run on one rank, and what lies around them: averages divide, and shards become terms."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import part
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllReduce, Divide, Embed
from torch_overlay.distributed.tensor._run import runners


class TestReduced(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _reduced(self, steps, local) -> torch.Tensor:
        mesh, coordinate = init_device_mesh("cpu", (4,)), (self.rank,)
        group = Group(mesh.get_group().group_name, (0, 1, 2, 3), in_order=True)
        for function in runners(steps, coordinate, steps[0].before.box(coordinate), lambda axes: group):
            local = function(local)
        return local

    def test_all_reduces(self) -> None:
        for shape in ((8, 8), (5, 7)):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            pending, replicas, rows = (
                Regions.of((dim,), (op,), shape, (4,)) for dim, op in ((None, "sum"), (None, None), (0, None))
            )
            summed = self._reduced([AllReduce(pending, replicas, (0,), "sum"), Divide(4)], whole)
            self.assertEqual(summed, whole)
            terms = [Embed(rows, pending), AllReduce(pending, replicas, (0,), "sum")]
            self.assertEqual(self._reduced(terms, part(whole, rows.box((self.rank,)))), whole)


if __name__ == "__main__":
    run_tests()
