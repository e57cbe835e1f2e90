# Owner(s): ["oncall: distributed"]
"""Meshes are layouts over one rank map."""

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshViews(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_slices_have_their_roots_tensor_and_tuple(self) -> None:
        self.assertEqual(self.mesh._rank_map.tolist(), list(range(24)))
        self.assertEqual(self.mesh._flatten_rank_map, tuple(range(24)))
        for name in ("_rank_map", "_flatten_rank_map"):
            self.assertIs(getattr(self.mesh["tp"], name), getattr(self.mesh, name))

    def test_ranks_that_are_no_ranks_are_refused(self) -> None:
        for wrong in ([0, 0], [0, 1.5], []):
            with self.assertRaises(ValueError):
                DeviceMesh("cpu", wrong)

    def test_coordinates_under_fake_tensors(self) -> None:
        """Where a tensor of ranks would be fake."""
        with FakeTensorMode():
            mesh = DeviceMesh("cpu", [0, 1, 2], _init_backend=False, _rank=2)
        self.assertEqual(mesh.get_coordinate(), (2,))

    def test_slices_on_a_rank_outside(self) -> None:
        outside = DeviceMesh("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], mesh_dim_names=("a", "b", "c"))
        self.assertEqual((outside["a"].size(), outside["a"].get_coordinate()), (2, None))
        self.assertEqual(outside["a", "b"]._flatten("ab").size(), 4)


if __name__ == "__main__":
    run_tests()
