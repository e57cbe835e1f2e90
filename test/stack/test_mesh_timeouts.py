# Owner(s): ["oncall: distributed"]
"""Meshes: their groups and ranks, their views and copies, and what is refused."""

import datetime
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.distributed_c10d import _timeout_of


class TestMeshTimeouts(TestCase):
    """Groups of a mesh wait as long as the default group does, unless the user says otherwise.

    In a world of one rank, in which an axis with a backend of its own has a group of its own.
    """

    def setUp(self) -> None:
        super().setUp()
        self._open_world(timeout=datetime.timedelta(seconds=77))
        self.addCleanup(dist.destroy_process_group)

    def _open_world(self, **timeout: datetime.timedelta) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **timeout)

    def _seconds(self, group: dist.ProcessGroup) -> float:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def test_the_default_groups_timeout_is_inherited(self) -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",), backend_override={"a": "gloo"})
        self.assertNotEqual(mesh.get_group(), dist.group.WORLD)
        self.assertEqual(self._seconds(mesh.get_group()), 77)

    def test_the_group_beside_a_default_group_of_another_backend_inherits_it(self) -> None:
        with mock.patch("torch.cuda.is_available", return_value=True):
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
        self.assertEqual(self._seconds(mesh.get_group()), 77)

    def test_a_given_timeout_wins(self) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=5)
        override = {"a": ("gloo", options), "b": "gloo"}
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"), backend_override=override)
        self.assertEqual([self._seconds(mesh.get_group(name)) for name in ("a", "b")], [5, 77])

    def test_a_constant_is_its_backends_own(self) -> None:
        dist.destroy_process_group()
        self._open_world()
        with mock.patch("torch.distributed.distributed_c10d._get_default_timeout") as constant:
            constant.side_effect = lambda backend: datetime.timedelta(minutes=30 if backend == "gloo" else 10)
            self.assertIsNone(_timeout_of(dist.group.WORLD))
            constant.side_effect = lambda backend: datetime.timedelta(minutes=10)
            self.assertEqual(_timeout_of(dist.group.WORLD), datetime.timedelta(minutes=30), "somebody asked for it")


if __name__ == "__main__":
    run_tests()
