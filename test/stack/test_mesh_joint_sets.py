# Owner(s): ["oncall: distributed"]
"""Groups over each set of dims that a mesh brings: more of TestJointGroups."""

import itertools

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_groups import joint_group_name

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

    def test_it_may_bring_one_over_each_set_of_dims(self) -> None:
        self._choose("create")
        mesh = self._mesh()
        for axes in SETS:
            ranks = mesh[tuple("abc"[axis] for axis in axes)].mesh.flatten().tolist()
            group = distributed_c10d._resolve_process_group(joint_group_name(mesh, axes))
            self.assertEqual(dist.get_process_group_ranks(group), ranks)

    def test_a_rank_outside_asks_for_the_groups_that_members_ask_for(self) -> None:
        """Those over dims with equal backends, whatever another view has along the same ranks."""
        self._choose("create")
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        mesh._unflatten("b", (2,), ("c",), backend_override={"c": "gloo"})
        self.assertEqual(joint_group_name(mesh, (0, 1)), "")
        unlike = (("gloo", None), (None, None))
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), backend_override=unlike)
        self.assertIsNone(joint_group_name(mesh, (0, 1)))

    def test_ranks_ask_for_the_same_groups_where_sharing_is_off(self) -> None:
        """For those of the dims alone. The backends of these, which differ here, aren't known outside."""
        self._choose("create", share="off")
        asked = []
        for rank in (1, 5):  # a member and one outside
            dist.destroy_process_group()
            dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=rank, world_size=8)
            before = distributed_c10d._world.group_count
            given = (("fake", None), (None, None))
            with config.patch(mesh_create_groups="world"):
                mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"), backend_override=given)
            asked.append(distributed_c10d._world.group_count - before)
            self.assertIsNone(joint_group_name(mesh, (0, 1)))
        self.assertEqual(asked, [4, 4])


if __name__ == "__main__":
    run_tests()
