# Owner(s): ["oncall: distributed"]
"""Meshes over equal ranks, with equal layouts and names, are equal."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshEquality(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def test_equal_meshes_are_equal_and_hash_alike(self) -> None:
        again = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))
        self.assertEqual(again, self.mesh)
        self.assertEqual(hash(again["tp"]), hash(self.mesh["tp"]))
        self.assertEqual(again._stable_hash(), self.mesh._stable_hash())
        self.assertNotEqual(self.mesh["tp"], self.mesh["dp"])

    def test_a_hash_needs_no_tuple_of_the_ranks(self) -> None:
        hash(self.mesh)
        self.assertNotIn("_flatten_rank_map", vars(self.mesh))

    def test_the_order_of_the_ranks_counts(self) -> None:
        ranks = torch.arange(4096).reshape(1024, 4)
        meshes = [DeviceMesh("cpu", given, _init_backend=False) for given in (ranks, ranks.clone(), ranks.flip(0))]
        self.assertEqual(meshes[0], meshes[1])
        self.assertNotEqual(meshes[0], meshes[2])


if __name__ == "__main__":
    run_tests()
