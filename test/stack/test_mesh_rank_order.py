# Owner(s): ["oncall: distributed"]
"""Groups have the mesh's order where it asks for it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshRankOrder(TestCase):
    """In a world of 4,096 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
        self.addCleanup(dist.destroy_process_group)

    def _mesh(self, kept: bool) -> DeviceMesh:
        ranks = torch.arange(4096).flip(0).reshape(1024, 4)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"), preserve_rank_order=kept)

    def test_groups_have_the_order_of_the_ranks(self) -> None:
        mesh = self._mesh(kept=True)
        for group in (mesh.get_group("tp"), mesh["tp"].get_group()):
            self.assertEqual(dist.get_process_group_ranks(group), [1235, 1234, 1233, 1232])

    def test_views_inherit_it(self) -> None:
        mesh = self._mesh(kept=True)
        cut = mesh["tp"]._unflatten(0, (2, 2), ("cp", "sp"))
        self.assertEqual(dist.get_process_group_ranks(cut.get_group("cp")), [1234, 1232])
        flat = mesh._flatten("all").get_group()
        self.assertEqual(dist.get_process_group_ranks(flat), list(range(4095, -1, -1)))

    def test_it_counts_in_comparisons(self) -> None:
        self.assertNotEqual(self._mesh(kept=True), self._mesh(kept=False))
        self.assertEqual(self._mesh(kept=True), self._mesh(kept=True))
        with self.assertRaisesRegex(RuntimeError, "with and without preserve_rank_order"):
            DeviceMesh._concatenate([self._mesh(kept=True)["dp"], self._mesh(kept=False)["tp"]])


if __name__ == "__main__":
    run_tests()
