# Owner(s): ["oncall: distributed"]
"""Ranks can compare their meshes before making groups."""

import dataclasses
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import _mesh_check
from torch_overlay.distributed._settings import get_settings


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


class TestMeshCheckRanks(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        asked = dataclasses.replace(get_settings(), check_mesh=True)
        patched = mock.patch.object(_mesh_check, "get_settings", lambda: asked)
        patched.start()
        self.addCleanup(patched.stop)
        self._spawn_threads()

    def test_ranks_that_build_different_meshes_are_told(self) -> None:
        _mesh_check.check_same_mesh(lambda: "(dp=2)")
        with self.assertRaisesRegex(RuntimeError, r"ranks 0 build \(0\); ranks 1 build \(1\)"):
            _mesh_check.check_same_mesh(lambda: f"({dist.get_rank()})")


if __name__ == "__main__":
    run_tests()
