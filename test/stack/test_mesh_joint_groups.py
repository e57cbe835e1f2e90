# Owner(s): ["oncall: distributed"]
"""Which groups over several dims a mesh brings."""

import itertools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_groups import joint_group_name, joint_groups_known
from torch_overlay.distributed._universe import private_groups

SETS = [axes for count in (2, 3) for axes in itertools.combinations(range(3), count)]


class TestJointGroups(TestCase):
    """On a 2 x 2 x 2 mesh, as rank 5 of 8 sees it; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def _choose(self, joint: str, share: str = "names") -> None:
        chosen = config.patch(mesh_share_groups=share, mesh_joint_groups=joint)
        chosen.__enter__()
        self.addCleanup(chosen.__exit__, None, None, None)

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    @parametrize("joint, there", [("existing", []), ("whole", [(0, 1, 2)])])
    def test_what_a_mesh_brings(self, joint, there) -> None:
        self._choose(joint)
        mesh = self._mesh()
        names = {axes: joint_group_name(mesh, axes) for axes in SETS}
        self.assertEqual([axes for axes in SETS if names[axes]], there)
        for axes in there:
            ranks = mesh[tuple("abc"[axis] for axis in axes)].mesh.flatten().tolist()
            group = dist.distributed_c10d._resolve_process_group(names[axes])
            self.assertEqual(dist.get_process_group_ranks(group), ranks)

    def test_an_unflattened_view_brings_one(self) -> None:
        self._choose("whole")
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("a",))
        known = joint_groups_known(mesh)
        view = mesh._unflatten("a", (2, 4), ("b", "c"))
        self.assertIsNotNone(joint_group_name(view, (0, 1)))
        self.assertNotEqual(joint_groups_known(mesh), known)
        with private_groups():
            private = mesh._unflatten("a", (2, 2, 2), ("b", "c", "d"))
        self.assertIsNone(joint_group_name(private, (0, 1, 2)))

    def test_views_share_nothing_where_sharing_is_off(self) -> None:
        self._choose("whole", share="off")
        self.assertIsNone(joint_group_name(self._mesh(), (0, 1, 2)))

    @parametrize("joint, share", [("existing", "names"), ("whole", "names"), ("whole", "off")])
    def test_the_default_group_serves_who_chose_it(self, joint, share) -> None:
        self._choose("existing")
        mesh = self._mesh()
        self.assertEqual(mesh._flatten("abc").get_group(), dist.group.WORLD)
        self._choose(joint, share)
        name = joint_group_name(mesh, (0, 1, 2))
        self.assertEqual(name == dist.group.WORLD.group_name, joint == "existing")

    def test_a_rank_outside_has_no_group(self) -> None:
        self._choose("whole")
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        self.assertEqual(joint_group_name(mesh, (0, 1)), "")


instantiate_parametrized_tests(TestJointGroups)

if __name__ == "__main__":
    run_tests()
