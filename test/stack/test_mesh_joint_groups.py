# Owner(s): ["oncall: distributed"]
"""Which groups over several dims a mesh brings."""

import itertools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
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

    def _choose(self, joint: str) -> None:
        chosen = config.patch(mesh_share_groups="names", mesh_joint_groups=joint)
        chosen.__enter__()
        self.addCleanup(chosen.__exit__, None, None, None)

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    @parametrize("joint, there", [("existing", []), ("whole", [(0, 1, 2)]), ("create", SETS)])
    def test_what_a_mesh_brings(self, joint, there) -> None:
        self._choose(joint)
        mesh = self._mesh()
        names = {axes: joint_group_name(mesh, axes) for axes in SETS}
        self.assertEqual([axes for axes in SETS if names[axes]], there)
        for axes in there:
            ranks = mesh[tuple("abc"[axis] for axis in axes)].mesh.flatten().tolist()
            group = dist.distributed_c10d._resolve_process_group(names[axes])
            self.assertEqual(dist.get_process_group_ranks(group), ranks)


instantiate_parametrized_tests(TestJointGroups)

if __name__ == "__main__":
    run_tests()
