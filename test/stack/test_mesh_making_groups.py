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
        other = DeviceMesh("cpu", [7, 13], mesh_dim_names=("q",), _root_mesh=self.mesh)
        self.assertIn(other.get_group().group_name, self.mesh._pg_registry)

    def test_ranks_that_the_world_lacks_are_refused_where_groups_are_made(self) -> None:
        """Before any group is made; as many as the world has would have the default group."""
        groups = [*dist.distributed_c10d._world.pg_map]
        for wrong in ([[0, 1], [13, 24]], [[-1, 13], [0, 1]], [*range(1, 25)]):
            with self.assertRaisesRegex(ValueError, "out of range"):
                DeviceMesh("cpu", wrong)
        self.assertEqual([*dist.distributed_c10d._world.pg_map], groups)
        self.assertEqual(DeviceMesh("cpu", [13, 24], _init_backend=False).size(), 2)
        with self.assertRaisesRegex(RuntimeError, "bigger than default world size"):
            init_device_mesh("cpu", (25,))

    def test_each_dim_has_a_name_and_a_backend_or_none_has(self) -> None:
        for wrong in ({"mesh_dim_names": ("dp",)}, {"backend_override": (("fake", None),)}):
            with self.assertRaises(ValueError):
                DeviceMesh("cpu", [[12, 13], [14, 15]], **wrong)


if __name__ == "__main__":
    run_tests()
