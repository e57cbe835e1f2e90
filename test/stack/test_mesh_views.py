# Owner(s): ["oncall: distributed"]
"""Views of a mesh hold nothing that grows with the world, and the ranks that their axes say."""

import itertools
import tracemalloc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD, RANK = 4096, 1234


class TestMeshViews(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
        self.mesh = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def _ranks(self, names) -> list[int]:
        """The twin: ranks of this rank's copy of these axes, picked from the whole array."""
        whole = torch.arange(WORLD).reshape(64, 8, 8)
        own = self.mesh.get_coordinate()
        index = tuple(slice(None) if name in names else own[i] for i, name in enumerate(("pp", "dp", "tp")))
        return whole[index].flatten().tolist()

    def test_slices_have_the_ranks_of_their_axes(self) -> None:
        for count in (1, 2, 3):
            for names in itertools.combinations(("pp", "dp", "tp"), count):
                view = self.mesh[names]
                self.assertEqual(view.mesh.flatten().tolist(), self._ranks(names), msg=f"{names}")
                self.assertEqual(view.get_coordinate(), [self.mesh.get_local_rank(name) for name in names])

    def test_permuted_axes(self) -> None:
        turned = self.mesh.permute(("tp", "pp", "dp"))
        self.assertEqual(turned.shape, (8, 64, 8))
        self.assertEqual(turned.mesh, torch.arange(WORLD, dtype=torch.int).reshape(64, 8, 8).permute(2, 0, 1))
        with self.assertRaisesRegex(ValueError, "each of"):
            self.mesh.permute(("tp", "pp"))

    def test_a_view_at_another_coordinate(self) -> None:
        other = self.mesh.submesh_at("tp", at={"pp": 3, "dp": 5})
        self.assertEqual(other.mesh.tolist(), list(range(3 * 64 + 5 * 8, 3 * 64 + 5 * 8 + 8)))

    def test_a_view_costs_the_same_in_any_world(self) -> None:
        self.mesh["dp", "tp"]  # what is made once
        tracemalloc.start()
        kept = [self.mesh["dp", "tp"] for _ in range(10)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
        tracemalloc.stop()
        self.assertLess(size, 16_000, msg="bytes of one view")

    def test_equal_meshes_are_equal_and_hash_alike(self) -> None:
        again = init_device_mesh("cpu", (64, 8, 8), mesh_dim_names=("pp", "dp", "tp"))
        self.assertEqual(again, self.mesh)
        self.assertEqual(hash(again["tp"]), hash(self.mesh["tp"]))
        self.assertNotEqual(self.mesh["tp"], self.mesh["dp"])

    def test_ranks_that_are_no_ranks_are_refused(self) -> None:
        for wrong in ([0, 0], [0, 0.5], []):
            with self.assertRaises(ValueError):
                DeviceMesh("cpu", wrong)


if __name__ == "__main__":
    run_tests()
