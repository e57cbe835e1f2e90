# Owner(s): ["oncall: distributed"]
"""Ranks are made on request, and may be assigned."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshViews(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_ranks_are_made_when_somebody_asks_for_them(self) -> None:
        mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], _init_backend=False, _rank=0)
        made = {"_rank_map", "_flatten_rank_map"}
        self.assertEqual(mesh.get_coordinate(), (1, 0))
        self.assertEqual(made & {*vars(mesh)}, set())
        self.assertEqual(mesh._flatten_rank_map, (3, 1, 0, 2))
        self.assertIn("_flatten_rank_map", vars(mesh))

    def test_a_pickle_has_the_rank_map_that_somebody_assigned(self) -> None:
        """The root's pickle keeps its own."""
        piece, ranks = self.mesh["tp"], torch.arange(24)
        piece._rank_map = ranks
        self.assertIs(piece.__getstate__()["_rank_map"], ranks)
        self.assertIs(self.mesh.__getstate__()["_rank_map"], self.mesh._rank_map)

    def test_a_mesh_without_ranks_has_no_rank_map_and_can_be_copied(self) -> None:
        """As one of a subclass whose constructor isn't DeviceMesh's."""

        class BareMesh(DeviceMesh):
            def __init__(self) -> None:
                self.purpose = "stands for a mesh"

        bare = BareMesh()
        for mesh in (bare, copy.copy(bare)):
            self.assertFalse(hasattr(mesh, "_rank_map"))
        bare._flatten_rank_map = (0, 1)  # and no layout
        self.assertEqual(copy.copy(bare).purpose, bare.purpose)


if __name__ == "__main__":
    run_tests()
