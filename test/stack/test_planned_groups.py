# Owner(s): ["oncall: distributed"]
"""Which groups over several mesh dims a redistribution finds, and that it makes none."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._joint_groups import Group, at_hand
from torch_overlay.distributed.tensor._planner.regions import NotPlanned
from torch_overlay.distributed.tensor._site import Site

PAIRS = [(0, 1), (0, 2), (1, 2)]


class TestGroupsAtHand(TestCase):
    """On a 2 x 2 x 2 mesh, as rank 5 of 8 sees it; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def _mesh(self, joint: str) -> DeviceMesh:
        with config.patch(mesh_share_groups="names", mesh_joint_groups=joint):
            return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    @parametrize("joint, axes", [("existing", []), ("whole", [(0, 1, 2)]), ("create", [*PAIRS, (0, 1, 2)])])
    def test_what_a_mesh_brings(self, joint, axes) -> None:
        mesh = self._mesh(joint)
        with config.patch(mesh_share_groups="names", mesh_joint_groups=joint):
            self.assertEqual(sorted(at_hand(mesh, Site.of(mesh)).joint), sorted(axes))
            for found in axes:
                ranks = mesh[tuple("abc"[axis] for axis in found)].mesh.flatten().tolist()
                name = at_hand(mesh, Site.of(mesh)).find(mesh, found).name
                self.assertEqual(
                    dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)), ranks
                )

    def test_a_flattened_view_serves_and_only_its_dims(self) -> None:
        with config.patch(mesh_share_groups="names", mesh_joint_groups="existing"):
            mesh = self._mesh("existing")
            flat = mesh["b", "c"]._flatten("bc")
            known = at_hand(mesh, Site.of(mesh))
            self.assertEqual(known.joint, {(1, 2)})
            group = known.find(mesh, (1, 2))
            self.assertEqual((group.name, group.places), (flat.get_group().group_name, (0, 1, 2, 3)))

    def test_a_group_may_have_its_own_order_but_no_other_ranks(self) -> None:
        ranks = [[3, 2, 1, 0], [7, 6, 5, 4]]
        groups = [dist.new_group([1, 5]), dist.new_group([4, 5, 6, 7])]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("a", "b"))
        known = at_hand(mesh, Site.of(mesh))
        self.assertEqual(known.find(mesh, (0,)), Group(groups[0].group_name, (0, 1), in_order=True))
        self.assertEqual(known.find(mesh, (1,)), Group(groups[1].group_name, (3, 2, 1, 0), in_order=False))
        swapped = DeviceMesh.from_group(groups[::-1], "cpu", mesh=ranks, mesh_dim_names=("a", "b"))
        with self.assertRaisesRegex(NotPlanned, r"holds \[4, 5, 6, 7\], not \[1, 5\]"):
            at_hand(swapped, Site.of(swapped)).find(swapped, (0,))

    def test_what_was_found_is_remembered_until_the_group_is_gone(self) -> None:
        mesh = init_device_mesh("cpu", (2, 4))
        known = at_hand(mesh, Site.of(mesh))
        found = known.find(mesh, (1,))
        self.assertIs(at_hand(mesh, Site.of(mesh)), known)
        self.assertIs(known.find(mesh, (1,)), found)
        dist.destroy_process_group(mesh.get_group(1))
        with self.assertRaisesRegex(RuntimeError, "the process group over dim_1 .* is gone"):
            known.find(mesh, (1,))


instantiate_parametrized_tests(TestGroupsAtHand)


if __name__ == "__main__":
    run_tests()
