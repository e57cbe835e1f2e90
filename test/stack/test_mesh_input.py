# Owner(s): ["oncall: distributed"]
"""What init_device_mesh is given stays as it is, and shapes that are none are refused."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshInput(TestCase):
    def test_a_dict_of_backends_makes_a_second_mesh_like_the_first(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        self.addCleanup(dist.destroy_process_group)
        given = {"tp": "fake", 0: "fake"}
        for _ in range(2):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=given)
            self.assertEqual(dist.get_backend(mesh.get_group("tp")), "fake")
            self.assertEqual(given, {"tp": "fake", 0: "fake"})
        with self.assertRaisesRegex(RuntimeError, "invalid keys in backend_override"):
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"pp": "fake"})

    def test_a_shape_has_no_size_below_one(self) -> None:
        for wrong in ((0,), (2, -2), (2, 2.0)):
            with self.assertRaisesRegex(ValueError, "at least 1"):
                init_device_mesh("cpu", wrong)


if __name__ == "__main__":
    run_tests()
