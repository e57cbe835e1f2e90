# Owner(s): ["oncall: distributed"]
"""The view of some axes at other coordinates than this rank's."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestSubmeshAt(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_a_view_at_another_coordinate(self) -> None:
        whole = torch.arange(64).reshape(4, 4, 4)
        for pp, dp in itertools.product(range(4), repeat=2):
            view = self.mesh.submesh_at("tp", at={"pp": pp, "dp": dp})
            self.assertEqual(view.mesh.tolist(), whole[pp, dp].tolist())
            if (pp, dp) == (2, 1):  # this rank is 37
                self.assertEqual(view.get_group(), self.mesh.get_group("tp"))
        self.assertEqual(self.mesh.submesh_at(("dp", "tp"), at={}).mesh, self.mesh["dp", "tp"].mesh)
        with self.assertRaisesRegex(ValueError, "coordinates 0 to 3"):
            self.mesh.submesh_at("tp", at={"pp": 4})


if __name__ == "__main__":
    run_tests()
