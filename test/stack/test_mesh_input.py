# Owner(s): ["oncall: distributed"]
"""What is given to make a mesh stays as it is, and what can't make one is refused."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh_input import read_mesh, read_names, read_sizes


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

    def test_ranks_are_whole_numbers_each_once(self) -> None:
        self.assertEqual(read_mesh([[3, 1], [2, 0]]).ranks(3), [3, 1, 2, 0])
        for wrong in ([0, 0], [0, 1.5], [], [[], []], torch.empty(2, device="meta"), [0, 1 << 40]):
            with self.assertRaises(ValueError, msg=f"{wrong}"):
                read_mesh(wrong)

    def test_each_dim_has_a_size_and_a_name(self) -> None:
        self.assertEqual((read_sizes([2, 4]), read_names(["dp", "tp"], 2)), ((2, 4), ("dp", "tp")))
        for size in (0, -1, 2.0, "2"):
            with self.assertRaisesRegex(ValueError, "at least 1"):
                read_sizes((4, size))
        for wrong in (("dp",), ("dp", [])):
            with self.assertRaises(ValueError):
                read_names(wrong, 2)


if __name__ == "__main__":
    run_tests()
