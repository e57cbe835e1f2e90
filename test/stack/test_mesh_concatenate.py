# Owner(s): ["oncall: distributed"]
"""The axes of several views side by side."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshConcatenate(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_axes_keep_their_ranks_and_groups(self) -> None:
        both = DeviceMesh._concatenate([self.mesh["pp"], self.mesh["tp"]])
        self.assertEqual(both, self.mesh["pp", "tp"])
        self.assertEqual(both.mesh.tolist(), [[0, 1, 2, 3], [12, 13, 14, 15]])
        self.assertEqual(both.get_group("tp"), self.mesh.get_group("tp"))

    def test_meshes_without_names_can_be_concatenated(self) -> None:
        cut = init_device_mesh("cpu", (24,))
        self.assertIsNone(DeviceMesh._concatenate([cut]).mesh_dim_names)

    def test_what_does_not_go_together_is_refused(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "overlapping"):
            DeviceMesh._concatenate([self.mesh["tp"], self.mesh["dp", "tp"]])
        with self.assertRaisesRegex(RuntimeError, "different device meshes"):
            DeviceMesh._concatenate([self.mesh["dp"], DeviceMesh("cpu", range(23, -1, -1), mesh_dim_names=("tp",))])
        with self.assertRaisesRegex(ValueError, "at least one mesh"):
            DeviceMesh._concatenate([])


if __name__ == "__main__":
    run_tests()
