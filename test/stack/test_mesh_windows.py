# Owner(s): ["oncall: distributed"]
"""Every copy of an axis, each as a mesh of its own."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshWindows(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_all_copies_of_an_axis_are_listed(self) -> None:
        every = self.mesh._get_all_submeshes("dp")
        self.assertEqual(every[5].mesh.tolist(), [13, 17, 21])
        self.assertEqual(every[5].get_group(), self.mesh.get_group("dp"))
        self.assertEqual([len(every), every[0].get_coordinate()], [8, None])
        self.assertEqual([one._dim_group_names for one in every if one is not every[5]], [[]] * 7)

    def test_a_mesh_that_does_not_say_its_rank_has_copies(self) -> None:
        del self.mesh._rank  # as of a subclass that makes its own state
        self.assertEqual(self.mesh._get_all_submeshes("dp")[5].get_group(), self.mesh.get_group("dp"))


if __name__ == "__main__":
    run_tests()
