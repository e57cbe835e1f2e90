# Owner(s): ["oncall: distributed"]
"""The same ranks with the axes in another order."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore


class TestMeshPermute(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_every_order(self) -> None:
        whole = torch.arange(64, dtype=torch.int).reshape(4, 4, 4)
        names = ("pp", "dp", "tp")
        for order in itertools.permutations(range(3)):
            turned = self.mesh.permute(tuple(names[axis] for axis in order))
            self.assertEqual(turned.mesh, whole.permute(order))
            self.assertEqual(turned.get_coordinate(), [self.mesh.get_coordinate()[axis] for axis in order])
            for name in names:
                self.assertEqual(turned.get_group(name), self.mesh.get_group(name))

    def test_flattened_it_has_its_own_order(self) -> None:
        turned = self.mesh.permute(("tp", "pp", "dp"))
        ranks = turned.mesh.flatten().tolist()
        self.assertNotEqual(ranks, sorted(ranks))
        self.assertEqual(dist.get_process_group_ranks(turned._flatten("all").get_group()), ranks)

    def test_names_that_are_no_order_are_refused(self) -> None:
        for names in (("tp", "pp"), ("tp", "pp", "pp"), ("tp", "pp", "ep")):
            with self.assertRaisesRegex(ValueError, "each name of the mesh once; it has .'pp', 'dp', 'tp'., got"):
                self.mesh.permute(names)
        with self.assertRaisesRegex(ValueError, "it has none"):
            init_device_mesh("cpu", (64,)).permute(("a",))


if __name__ == "__main__":
    run_tests()
