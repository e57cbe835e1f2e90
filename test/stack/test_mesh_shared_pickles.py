# Owner(s): ["oncall: distributed"]
"""A loaded mesh shares groups with the mesh that was saved, and with no equal one."""

import io

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config


class TestSharedPickles(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_on = config.patch(mesh_share_groups="names")
        switched_on.__enter__()
        self.addCleanup(switched_on.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def _meshes(self):
        return [init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b")) for _ in range(2)]

    def _saved(self, *meshes) -> io.BytesIO:
        saved = io.BytesIO()
        torch.save(meshes, saved)
        saved.seek(0)
        return saved

    def test_a_mesh_that_is_not_here_has_groups_of_an_equal_one(self) -> None:
        """Of the second of two meshes, in a process that made one, whose other axis has these ranks under another name
        first."""
        saved = self._saved(self._meshes()[1])
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        first = mesh._unflatten(0, (4, 16), ("x", "y"))
        equal = mesh._unflatten(0, (4, 16), ("a", "b"))
        (loaded,) = torch.load(saved, weights_only=False)
        self.assertEqual(loaded.get_group("b"), equal.get_group("b"))
        self.assertNotEqual(loaded.get_group("b"), first.get_group("y"))


if __name__ == "__main__":
    run_tests()
