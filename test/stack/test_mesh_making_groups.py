# Owner(s): ["oncall: distributed"]
"""A mesh makes the groups of its dims where its root looks for them."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshMakingGroups(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_each_dim_has_a_group_and_a_rank_outside_none(self) -> None:
        ranks = [dist.get_process_group_ranks(group) for group in self.mesh.get_all_groups()]
        self.assertEqual(ranks, [[1, 13], [13, 17, 21], [12, 13, 14, 15]])
        self.assertEqual(DeviceMesh("cpu", [[0, 1], [2, 3]])._dim_group_names, [])

    def test_a_mesh_of_another_rank_map_has_its_groups_where_its_root_has(self) -> None:
        """Compiled code looks for them there."""
        for root in (self.mesh, self.mesh["tp"]):
            other = DeviceMesh("cpu", [7, 13], mesh_dim_names=("q",), _root_mesh=root)
            self.assertIs(other._get_root_mesh(), self.mesh)
            self.assertIn(other.get_group().group_name, self.mesh._pg_registry)


if __name__ == "__main__":
    run_tests()
