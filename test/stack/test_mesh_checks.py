# Owner(s): ["oncall: distributed"]
"""A mesh checks its ranks and names before it makes a group."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshChecks(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
        self.addCleanup(dist.destroy_process_group)

    def test_ranks_that_the_world_lacks_are_refused_where_groups_are_made(self) -> None:
        """Without the check, the last mesh, as long as the world, would have the default group."""
        groups = [*dist.distributed_c10d._world.pg_map]
        for wrong in ([[0, 1], [13, 24]], [[-1, 13], [0, 1]], [*range(1, 25)]):
            with self.assertRaisesRegex(ValueError, "out of range"):
                DeviceMesh("cpu", wrong)
        self.assertEqual([*dist.distributed_c10d._world.pg_map], groups)
        self.assertEqual(DeviceMesh("cpu", [13, 24], _init_backend=False).size(), 2)
        with self.assertRaisesRegex(RuntimeError, "bigger than default world size"):
            init_device_mesh("cpu", (25,))

    def test_each_dim_has_a_name_and_a_backend_or_none_has(self) -> None:
        with self.assertRaisesRegex(ValueError, "needs as many mesh_dim_names"):
            DeviceMesh("cpu", [[12, 13], [14, 15]], mesh_dim_names=("dp",))
        with self.assertRaisesRegex(ValueError, "backend_override should have the same length"):
            DeviceMesh("cpu", [[12, 13], [14, 15]], backend_override=(("fake", None),))
        with self.assertRaisesRegex(ValueError, "needs as many mesh_dim_names"):
            DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp"))


if __name__ == "__main__":
    run_tests()
