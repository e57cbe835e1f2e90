# Owner(s): ["oncall: distributed"]
"""Meshes are layouts over one rank map."""

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshViews(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def test_ranks_are_kept_once_and_shown_on_request(self) -> None:
        self.assertEqual(self.mesh._rank_map.tolist(), list(range(4096)))
        self.assertEqual(self.mesh._flatten_rank_map, tuple(range(4096)))
        for name in ("_rank_map", "_flatten_rank_map"):
            self.assertIs(getattr(self.mesh["tp"], name), getattr(self.mesh, name))

    def test_ranks_that_are_no_ranks_are_refused(self) -> None:
        for wrong in ([0, 0], [0, 1.5], []):
            with self.assertRaises(ValueError):
                DeviceMesh("cpu", wrong)

    def test_coordinates_under_fake_tensors(self) -> None:
        """As decompositions make a mesh while they trace."""
        with FakeTensorMode():
            mesh = DeviceMesh("cpu", [0, 1, 2], _init_backend=False, _rank=2)
        self.assertEqual(mesh.get_coordinate(), [2])


if __name__ == "__main__":
    run_tests()
