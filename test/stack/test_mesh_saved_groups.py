# Owner(s): ["oncall: distributed"]
"""A loaded mesh has the groups of the mesh that it was saved from, and no equal one's."""

import io

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config


class SavedUniverseTest(TestCase):
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


class TestSavedGroups(SavedUniverseTest):
    def test_each_of_two_equal_meshes_has_its_own_groups(self) -> None:
        meshes = self._meshes()
        saved = self._saved(*meshes)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        here = self._meshes()
        for mesh, loaded in zip(here, torch.load(saved, weights_only=False), strict=True):
            for name in ("a", "b"):  # along b the groups have the names that were saved
                self.assertEqual(loaded.get_group(name), mesh.get_group(name))
            self.assertEqual(loaded.get_coordinate(), [0, 7])

    def test_a_group_that_was_destroyed_is_not_another(self) -> None:
        saved = self._saved(self._meshes()[0])
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        one, _ = self._meshes()
        dist.destroy_process_group(one.get_group("b"))
        (loaded,) = torch.load(saved, weights_only=False)
        with self.assertRaises(RuntimeError):
            loaded.get_group("b")


if __name__ == "__main__":
    run_tests()
