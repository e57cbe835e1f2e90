# Owner(s): ["oncall: distributed"]
"""Groups over several dims go where nobody has the mesh any more and its owner destroyed the groups of its axes."""

import gc
import pickle
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._group_table import find_group
from torch_overlay.distributed._mesh_groups import joint_group_name, joint_groups_known


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

    @config.patch(mesh_share_groups="names", mesh_joint_groups="create")
    def test_they_stay_where_ranks_end_a_communicator_together(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
        name = joint_group_name(mesh, (0, 1))
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)
        del mesh
        gc.collect()
        with mock.patch.object(distributed_c10d, "get_backend", lambda group: "nccl"):
            init_device_mesh("cpu", (4, 4))
        self.assertIsNotNone(find_group(name))

    @config.patch(mesh_share_groups="names", mesh_joint_groups="create")
    def test_groups_may_be_destroyed_after_the_next_mesh(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
        name, groups = joint_group_name(mesh, (0, 1)), mesh.get_all_groups()
        del mesh
        gc.collect()
        init_device_mesh("cpu", (4, 4))
        for group in groups:
            self.assertIsNotNone(find_group(name))
            dist.destroy_process_group(group)
        init_device_mesh("cpu", (4, 4))
        self.assertIsNone(find_group(name))

    @config.patch(mesh_share_groups="names", mesh_joint_groups="create")
    @parametrize("create", ["members", "world"])
    def test_a_mesh_that_is_loaded_later_gets_a_live_one(self, create) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
        self.addCleanup(dist.destroy_process_group)
        with config.patch(mesh_create_groups=create):
            mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("a", "b"))
            saved = pickle.dumps(mesh)
            name, known = joint_group_name(mesh, (0, 1)), joint_groups_known(mesh)
            for group in mesh.get_all_groups():
                dist.destroy_process_group(group)
            del mesh
            gc.collect()
            init_device_mesh("cpu", (4, 4))
            self.assertEqual(find_group(name) is None, create == "members")
            self.assertEqual(joint_groups_known(pickle.loads(saved)) == known, create == "world", msg="says so")
            view = pickle.loads(saved)._unflatten("b", (2, 4), ("c", "d"))
            self.assertIsNotNone(find_group(joint_group_name(view, (0, 1, 2))))


instantiate_parametrized_tests(TestJointClosed)


if __name__ == "__main__":
    run_tests()
