# Owner(s): ["oncall: distributed"]
"""get_group() finds the mesh's own axes before flattened views, and says where there is none."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshGetGroup(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    RANK = 13

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_own_axes_come_before_flattened_views(self) -> None:
        self.mesh["pp", "tp"]._flatten("model")
        cut = self.mesh._unflatten(2, (2, 2), ("model", "sp"))
        self.assertEqual(dist.get_process_group_ranks(cut.get_group("model")), [13, 15])
        self.assertEqual(cut.get_group("model"), cut["model"].get_group())
        self.assertEqual(self.mesh.get_group("model"), self.mesh["model"].get_group())

    def test_a_rank_outside_is_told(self) -> None:
        outside = DeviceMesh("cpu", torch.arange(8), mesh_dim_names=("dp",))
        with self.assertRaisesRegex(RuntimeError, "Rank 13 isn't in the mesh"):
            outside.get_group("dp")

    def test_a_mesh_without_dims_has_no_group(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "without dims has no process group"):
            DeviceMesh("cpu", torch.tensor(self.RANK)).get_group()


if __name__ == "__main__":
    run_tests()
