# Owner(s): ["oncall: distributed"]
"""A loaded mesh is of the universe that it was saved from, and of no equal one."""

import io

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._universe import current_world, find_universe


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


class TestSavedUniverse(SavedUniverseTest):
    def test_views_that_are_made_later_share_groups_too(self) -> None:
        mesh, _ = self._meshes()
        saved = self._saved(mesh)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        mesh, _ = self._meshes()
        (loaded,) = torch.load(saved, weights_only=False)
        cut = [one._unflatten(1, (2, 8), ("c", "d")) for one in (mesh, loaded)]
        self.assertEqual(cut[0].get_group("d"), cut[1].get_group("d"))

    def test_a_universe_is_found_by_its_ranks_and_number(self) -> None:
        world, ranks = current_world(), RankMap.identity(64)
        one, other = (world.open_universe(ranks) for _ in range(2))
        private = world.open_universe(ranks, world.next_private(ranks))
        self.assertIs(find_universe(RankMap(range(64)), None, 2), other)
        self.assertIs(find_universe(ranks, None, 9), one, msg="the first, where that number isn't here")
        self.assertIs(find_universe(ranks, private.private, 3), private)
        self.assertIsNone(find_universe(RankMap([1, 0]), None, 1))


if __name__ == "__main__":
    run_tests()
