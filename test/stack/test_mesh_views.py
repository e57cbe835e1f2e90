# Owner(s): ["oncall: distributed"]
"""Meshes are layouts over one rank map: the ranks, the value and the groups that they say."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshViews(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    WORLD, RANK = 4096, 1234

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=self.WORLD)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_ranks_are_kept_once_and_shown_on_request(self) -> None:
        for name in ("_rank_map", "_flatten_rank_map"):
            self.assertNotIn(name, vars(self.mesh))
        self.assertEqual(self.mesh._rank_map.tolist(), list(range(self.WORLD)))
        self.assertEqual(self.mesh._flatten_rank_map, tuple(range(self.WORLD)))
        view = self.mesh["pp", "tp"]
        self.assertIs(view._rank_map, self.mesh._rank_map)
        self.assertEqual(view.mesh.data_ptr() - self.mesh.mesh.data_ptr(), 8 * 2 * view.mesh.element_size())
        self.assertEqual(view.get_coordinate(), [19, 2])

    def test_equal_meshes_are_equal_and_hash_alike(self) -> None:
        again = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))
        self.assertEqual(again, self.mesh)
        self.assertEqual(hash(again["tp"]), hash(self.mesh["tp"]))
        self.assertNotEqual(self.mesh["tp"], self.mesh["dp"])

    def test_groups_keep_the_order_of_the_ranks_where_the_mesh_says_so(self) -> None:
        ranks = torch.arange(self.WORLD).flip(0).reshape(1024, 4)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"), preserve_rank_order=True)
        for group in (mesh.get_group("tp"), mesh["tp"].get_group()):
            self.assertEqual(dist.get_process_group_ranks(group), [1235, 1234, 1233, 1232])

    def test_ranks_that_are_no_ranks_are_refused(self) -> None:
        for wrong in ([0, 0], [0, 1.5], []):
            with self.assertRaises(ValueError):
                DeviceMesh("cpu", wrong)


if __name__ == "__main__":
    run_tests()
