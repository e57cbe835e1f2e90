# Owner(s): ["oncall: distributed"]
"""The view of some axes at other coordinates than this rank's."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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

    def test_a_flattened_view_at_another_coordinate(self) -> None:
        self.mesh["dp", "tp"]._flatten("model")
        self.assertEqual(self.mesh.submesh_at("model", at={"pp": 1}).mesh.tolist(), list(range(16, 32)))

    def test_a_mesh_without_groups_has_none_at_any_coordinate(self) -> None:
        bare = DeviceMesh("cpu", self.mesh.mesh, mesh_dim_names=("pp", "dp", "tp"), _init_backend=False)
        for pp in range(4):
            with self.assertRaisesRegex(RuntimeError, "not initialized"):
                bare.submesh_at(("dp", "tp"), at={"pp": pp}).get_group("tp")

    def test_what_is_no_coordinate_is_refused(self) -> None:
        self.mesh["dp", "tp"]._flatten("model")
        for shown, at, error, text in (
            ("tp", {"pp": 4}, ValueError, "coordinates 0 to 3"),
            ("tp", {"ep": 0}, KeyError, "No axis 'ep'"),
            ("tp", {"tp": 0}, ValueError, "is shown"),
            ("model", {"tp": 0}, ValueError, "is shown"),
            (("tp", "model"), {}, ValueError, "each once"),
        ):
            with self.assertRaisesRegex(error, text):
                self.mesh.submesh_at(shown, at=at)


if __name__ == "__main__":
    run_tests()
