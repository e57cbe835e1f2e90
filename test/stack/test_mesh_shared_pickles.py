# Owner(s): ["oncall: distributed"]
"""A loaded mesh shares groups with the mesh that was saved, and with no equal one."""

import io

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import _universe, config


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


class TestSharedPickles(SavedUniverseTest):
    def test_a_mesh_that_is_not_here_has_groups_of_an_equal_one(self) -> None:
        """Not that of another axis over these ranks, which may even have the name that was saved."""
        mesh = self._meshes()[1]
        saved, saved_name = self._saved(mesh), mesh.get_group("b").group_name
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        others = [mesh._unflatten(0, (4, 16), names) for names in (("u", "v"), ("x", "y"))]
        equal = mesh._unflatten(0, (4, 16), ("a", "b"))
        (loaded,) = torch.load(saved, weights_only=False)
        self.assertEqual(loaded.get_group("b"), equal.get_group("b"))
        self.assertEqual(saved_name, others[1].get_group("y").group_name)

    def test_a_submesh_of_a_private_mesh_has_its_groups(self) -> None:
        with _universe.private_groups():
            private = self._meshes()[0]
        (loaded,) = torch.load(self._saved(private._get_all_submeshes("b")[0]), weights_only=False)
        self.assertEqual(loaded.get_group(), private.get_group("b"))

    def test_a_private_mesh_gives_none(self) -> None:
        """Though its group along b has the name that was saved."""
        saved = self._saved(self._meshes()[0])
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        with _universe.private_groups():
            private = self._meshes()[0]
        (loaded,) = torch.load(saved, weights_only=False)
        for name in ("a", "b"):
            with self.assertRaisesRegex(RuntimeError, "no process group here has the ranks"):
                loaded.get_group(name)
            self.assertEqual(private.get_group(name).size(), dict(a=4, b=16)[name])


if __name__ == "__main__":
    run_tests()
