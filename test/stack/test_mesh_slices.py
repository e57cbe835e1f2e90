# Owner(s): ["oncall: distributed"]
"""Slices hold nothing that grows with the world, and the ranks that their axes say."""

import itertools
import tracemalloc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshSlices(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    WORLD, RANK = 4096, 1234

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.RANK, world_size=self.WORLD)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def _ranks(self, names) -> list[int]:
        """The ranks of this rank's copy of these axes, picked from the whole array."""
        whole = torch.arange(self.WORLD).reshape(64, 8, 8)
        own = self.mesh.get_coordinate()
        index = tuple(slice(None) if name in names else own[i] for i, name in enumerate(("pp", "dp", "tp")))
        return whole[index].flatten().tolist()

    def test_slices_have_the_ranks_of_their_axes(self) -> None:
        for count in (1, 2, 3):
            for names in itertools.combinations(("pp", "dp", "tp"), count):
                view = self.mesh[names]
                self.assertEqual(view.mesh.flatten().tolist(), self._ranks(names), msg=f"{names}")
                self.assertEqual(view.get_coordinate(), [self.mesh.get_local_rank(name) for name in names])

    def test_a_view_costs_the_same_in_any_world(self) -> None:
        self.mesh["dp", "tp"]  # what is made once
        tracemalloc.start()
        kept = [self.mesh["dp", "tp"] for _ in range(10)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
        tracemalloc.stop()
        self.assertLess(size, 16_000, msg="bytes of one view")

    def test_a_mesh_without_groups_can_be_sliced(self) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _init_backend=False)
        self.assertEqual(mesh["tp"].shape, (2,))


if __name__ == "__main__":
    run_tests()
