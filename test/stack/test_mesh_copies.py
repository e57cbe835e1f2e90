# Owner(s): ["oncall: distributed"]
"""A copy of a mesh is another mesh over the same groups."""

import copy

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshCopies(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    RANK = 13

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_a_copy_is_a_mesh_over_the_same_groups(self) -> None:
        for made in (copy.copy(self.mesh), copy.deepcopy(self.mesh["dp", "tp"])):
            self.assertEqual(made, self.mesh if made.ndim == 3 else self.mesh["dp", "tp"])
            self.assertEqual(made.get_group("tp"), self.mesh.get_group("tp"))

    def test_what_is_copied_together_has_one_root(self) -> None:
        mesh, view = copy.deepcopy([self.mesh, self.mesh["tp"]])
        self.assertIs(view._get_root_mesh(), mesh)
        self.assertIsNot(mesh, self.mesh)
        self.mesh["dp", "tp"]._flatten("model")
        self.assertEqual(mesh["model"], self.mesh["model"])

    def test_what_users_put_on_a_mesh_comes_along(self) -> None:
        self.mesh.notes = ["kept"]
        self.assertIs(copy.copy(self.mesh).notes, self.mesh.notes)
        copied = copy.deepcopy(self.mesh).notes
        self.assertEqual(copied, ["kept"])
        self.assertIsNot(copied, self.mesh.notes)
        self.mesh.get_rank = lambda: 3
        self.assertEqual(copy.copy(self.mesh).get_rank(), 3)


if __name__ == "__main__":
    run_tests()
