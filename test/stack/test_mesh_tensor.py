# Owner(s): ["oncall: distributed"]
"""What a mesh says of its ranks comes from its layout."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshTensor(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def test_the_tensors_of_all_views_share_one_memory(self) -> None:
        view = self.mesh["pp", "tp"]
        self.assertEqual(view.mesh.data_ptr() - self.mesh.mesh.data_ptr(), 8 * 2 * view.mesh.element_size())

    def test_coordinates_need_no_tensor_of_the_ranks(self) -> None:
        self.assertNotIn("_rank_map", vars(self.mesh))
        self.assertEqual(self.mesh.get_coordinate(), [19, 2, 2])
        self.assertEqual(self.mesh["pp", "tp"].get_coordinate(), [19, 2])

    def test_a_rank_outside_sees_the_first_copy(self) -> None:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=6)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.assertEqual(mesh["tp"].mesh.tolist(), [0, 1])


if __name__ == "__main__":
    run_tests()
