# Owner(s): ["oncall: distributed"]
"""Ranks can compare their meshes before making groups."""

from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshCheck(TestCase):
    def test_a_mesh_says_what_it_is_before_it_makes_groups(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        said = []
        check = "torch_overlay.distributed._mesh_groups.check_same_mesh"
        with mock.patch(check, lambda describe: said.append(describe())):
            init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            DeviceMesh("cpu", [3, 2, 1, 0])
        self.assertRegex(said[0], r"^\(dp=2, tp=4\) on cpu over ranks 0 to 7 as .*2.*4.*4.*1")
        self.assertRegex(said[1], r"^\(4\) on cpu over ranks .*3.*0.* #[0-9a-f]{8} as .*4.*1")


if __name__ == "__main__":
    run_tests()
