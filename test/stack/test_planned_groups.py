# Owner(s): ["oncall: distributed"]
"""Which groups over several mesh dims a redistribution finds, and that it makes none."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed.tensor._joint_groups import at_hand, joint_axes
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
            self.assertEqual(sorted(joint_axes(mesh)), sorted(axes))
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
            self.assertEqual(joint_axes(mesh), {(1, 2)})
            group = at_hand(mesh, Site.of(mesh)).find(mesh, (1, 2))
            self.assertEqual((group.name, group.places), (flat.get_group().group_name, (0, 1, 2, 3)))


instantiate_parametrized_tests(TestGroupsAtHand)


if __name__ == "__main__":
    run_tests()
