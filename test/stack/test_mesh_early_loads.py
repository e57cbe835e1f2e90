# Owner(s): ["oncall: distributed"]
"""A mesh that is loaded early belongs to the process that loads it, once there is a world."""

import io

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class SavedMeshTest(TestCase):
    """Saved as one rank of a world, loaded as another; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        self._join(rank=5)
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        mesh._flatten("world")
        self.saved = io.BytesIO()
        torch.save([mesh, mesh["tp"]], self.saved)
        self.saved.seek(0)
        dist.destroy_process_group()

    def _join(self, rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)

    def tearDown(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()


class TestMeshEarlyLoads(SavedMeshTest):
    def test_loaded_early_it_waits_for_the_world(self) -> None:
        mesh, row = torch.load(self.saved, weights_only=False)
        self.assertEqual(mesh.get_coordinate(), [1, 1], "of rank 5, which saved it")
        self._join(rank=10)
        here = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        self.assertEqual(mesh.get_coordinate(), [2, 2])
        self.assertEqual(row.get_coordinate(), [2])
        self.assertEqual(mesh["tp"].get_local_rank(), 2)
        self.assertEqual(mesh.get_group("tp"), here.get_group("tp"))


if __name__ == "__main__":
    run_tests()
