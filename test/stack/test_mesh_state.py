# Owner(s): ["oncall: distributed"]
"""A root mesh and all its views have one state, whoever made them."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._mesh_state import shared_state, view_of


class TestMeshState(TestCase):
    """In a world of 24 of which this process plays one; no bytes move."""

    RANK = 13

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=24)
        self.addCleanup(dist.destroy_process_group)
        self.mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))

    def test_all_views_of_a_root_have_its_state(self) -> None:
        views = [self.mesh["dp"], self.mesh["pp", "tp"], self.mesh["dp", "tp"]._flatten("model"), self.mesh["model"]]
        for view in views:
            self.assertIs(shared_state(view), shared_state(self.mesh))
            self.assertEqual(view_of(view).ranks(self.RANK), view.mesh.flatten().tolist())
        self.assertIs(shared_state(self.mesh).flattened["model"], self.mesh._flatten_mapping["model"])
        again = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))
        self.assertIsNot(shared_state(again), shared_state(self.mesh))

    def test_a_mesh_that_holds_what_was_stored_before_gets_its_state(self) -> None:
        ranks = torch.arange(23, -1, -1).reshape(6, 4)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        view = mesh["tp"]
        for old in (mesh, view):
            old.__dict__["_rank_map"] = ranks.flatten()
            for new in ("_view", "_shared_state"):
                old.__dict__.pop(new, None)
        self.assertIs(shared_state(view), shared_state(mesh))
        self.assertEqual(view_of(view).ranks(self.RANK), [15, 14, 13, 12])
        self.assertEqual(view_of(mesh).coordinate(self.RANK), (2, 2))

    def test_a_mesh_of_other_ranks_than_its_roots_keeps_them(self) -> None:
        for again in (lambda mesh: pickle.loads(pickle.dumps(mesh)), copy.copy):
            other = DeviceMesh("cpu", [self.RANK, 7], mesh_dim_names=("q",), _root_mesh=self.mesh)
            other = again(again(other))
            self.assertEqual(other._flatten_rank_map, (self.RANK, 7))
            self.assertEqual(view_of(other).ranks(self.RANK), [self.RANK, 7])
            self.assertIs(shared_state(other).registry, shared_state(other._root_mesh).registry)


if __name__ == "__main__":
    run_tests()
