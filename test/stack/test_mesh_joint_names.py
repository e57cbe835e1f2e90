# Owner(s): ["oncall: distributed"]
"""The group over several dims of a mesh is that of a flattened view."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_groups import joint_group_name


class TestJointNames(TestCase):
    @config.patch(mesh_share_groups="names")
    def test_a_flattened_view_adds_its_dims(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        self.assertIsNone(joint_group_name(mesh, (1, 2)))
        flat = mesh["b", "c"]._flatten("bc")
        self.assertEqual(joint_group_name(mesh, (2, 1)), flat.get_group().group_name, msg="in whatever order")
        self.assertEqual(joint_group_name(mesh["b", "c"], (0, 1)), flat.get_group().group_name)
        self.assertIsNone(joint_group_name(mesh, (0, 1)))


if __name__ == "__main__":
    run_tests()
