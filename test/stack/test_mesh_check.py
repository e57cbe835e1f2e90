# Owner(s): ["oncall: distributed"]
"""Groups of a mesh wait as long as the default group does, and ranks can compare their meshes before making groups."""

import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed import _mesh_check


class TestTimeouts(TestCase):
    def test_a_group_inherits_the_default_groups_timeout(self) -> None:
        given = datetime.timedelta(seconds=77)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=given)
        self.addCleanup(dist.destroy_process_group)
        # A group of its own, since the options are.
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=5)
        own = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"), backend_override={"a": ("gloo", options)})
        seconds = [
            own.get_group(axis)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for axis in ("a", "b")
        ]
        self.assertEqual(seconds, [5, 77])
        self.assertEqual(DeviceMesh("cpu", [0]).size(), 1)


class TestCompare(TestCase):
    """What rank 0 says when the lines of all ranks are in the store."""

    def _verdict(self, lines: dict[int, str], size: int) -> str:
        store = dist.HashStore()
        for rank, line in lines.items():
            store.set(f"mesh/{rank}", line)
        return _mesh_check._verdict(store, "mesh", size, 0.2, _mesh_check.MESH)

    def test_all_the_same(self) -> None:
        self.assertEqual(self._verdict({0: "(a=2)", 1: "(a=2)"}, 2), "same")

    def test_a_rank_that_differs_is_named(self) -> None:
        said = self._verdict({0: "(a=2)", 1: "(b=2)", 2: "(a=2)"}, 3)
        self.assertIn("ranks [0, 2] build (a=2); ranks [1] build (b=2)", said)

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        self.assertIn("ranks [1] didn't come", self._verdict({0: "(a=2)"}, 2))


if __name__ == "__main__":
    run_tests()
