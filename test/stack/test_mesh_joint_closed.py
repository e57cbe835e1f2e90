# Owner(s): ["oncall: distributed"]
"""Groups over several dims go where nobody has the mesh any more and its owner destroyed the groups of its axes."""

import gc

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._group_table import find_group
from torch_overlay.distributed._mesh_groups import joint_group_name


class TestJointClosed(TestCase):
    @config.patch(mesh_share_groups="names", mesh_joint_groups="create")
    @parametrize("destroyed, held, there", [(2, False, False), (1, False, True), (2, True, True)])
    def test_they_go_with_the_mesh_and_its_groups(self, destroyed, held, there) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
        name = joint_group_name(mesh, (0, 1))
        for axis in ("a", "b")[:destroyed]:
            dist.destroy_process_group(mesh.get_group(axis))
        holder = mesh if held else None
        del mesh
        gc.collect()
        self.assertIsNotNone(find_group(name), msg="not before the next mesh")
        init_device_mesh("cpu", (4, 4), mesh_dim_names=("a", "b"))
        self.assertEqual(find_group(name) is not None, there, msg=str(holder))


instantiate_parametrized_tests(TestJointClosed)


if __name__ == "__main__":
    run_tests()
