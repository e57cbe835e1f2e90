# Owner(s): ["oncall: distributed"]
"""The group over several dims of a mesh is that of a flattened view."""

import datetime
import pickle

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_groups import joint_group_name, joint_groups_known
from torch_overlay.distributed._universe import private_groups


class TestJointNames(TestCase):
    """On a 2 x 2 x 2 mesh, as rank 5 of 8 sees it; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_on = config.patch(mesh_share_groups="names")
        switched_on.__enter__()
        self.addCleanup(switched_on.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    def test_a_flattened_view_adds_its_dims(self) -> None:
        mesh = self.mesh
        self.assertIsNone(joint_group_name(mesh, (1, 2)))
        known = joint_groups_known(mesh)
        flat = mesh["b", "c"]._flatten("bc")
        self.assertNotEqual(joint_groups_known(mesh), known)
        self.assertEqual(joint_group_name(mesh, (2, 1)), flat.get_group().group_name, msg="in whatever order")
        self.assertEqual(joint_group_name(mesh["b", "c"], (0, 1)), flat.get_group().group_name)
        self.assertIsNone(joint_group_name(mesh, (0, 1)))

    def test_dims_with_other_options_are_not_joined(self) -> None:
        options = FakeProcessGroup.Options()
        options._timeout = datetime.timedelta(seconds=7)
        mesh = self.mesh._unflatten("c", (2, 1), ("d", "e"), backend_override={"d": options})
        mesh["a", "b"]._flatten("ab")
        mesh["b", "d"]._flatten("bd")
        self.assertIsNotNone(joint_group_name(mesh, (0, 1)))
        self.assertIsNone(joint_group_name(mesh, (1, 2)))
        mesh["a", "d"]._flatten("ad", backend_override=options)
        self.assertIsNone(joint_group_name(mesh, (0, 2)), msg="nor if the view has one's options")

    def test_a_flattened_view_without_a_group_adds_none(self) -> None:
        """As that of a loaded mesh whose group isn't here."""
        self.mesh["b", "c"]._flatten("bc")
        saved = pickle.dumps(self.mesh)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        self.assertIsNone(joint_group_name(pickle.loads(saved), (1, 2)))

    def test_a_private_view_uses_no_flattened_view(self) -> None:
        outside = self.mesh["b", "c"]._flatten("bc")._unflatten(0, (2, 2), ("x", "y"))
        self.assertIsNotNone(joint_group_name(outside, (0, 1)))
        with private_groups():
            inside = self.mesh["bc"]._unflatten(0, (2, 2), ("x", "y"))
        self.assertIsNone(joint_group_name(inside, (0, 1)))


if __name__ == "__main__":
    run_tests()
