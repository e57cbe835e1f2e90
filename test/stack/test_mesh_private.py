# Owner(s): ["oncall: distributed"]
"""A mesh that is made private shares no group with another."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._universe import current_world, private_groups


class TestPrivateMesh(TestCase):
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

    def test_a_private_mesh_uses_nothing_of_others(self) -> None:
        """Its collectives may overlap with those of an equal mesh, and with those of the world."""
        with private_groups():
            private = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
            again = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        self.assertNotEqual(private.get_group(), dist.group.WORLD)
        self.assertNotEqual(private.get_group(), again.get_group())
        self.assertNotEqual(private, init_device_mesh("cpu", (64,), mesh_dim_names=("world",)))
        one, other = (private._unflatten(0, (4, 16), ("a", "b")) for _ in range(2))
        self.assertEqual(
            one.get_group("a"), other.get_group("a"), msg="views made outside of the block are private, too"
        )

    @config.patch(mesh_share_groups="world")
    def test_it_shares_nothing_where_all_meshes_share(self) -> None:
        plain, also_plain = (init_device_mesh("cpu", (4, 16)) for _ in range(2))
        with private_groups():
            private = init_device_mesh("cpu", (4, 16))
        self.assertEqual(plain.get_group(1), also_plain.get_group(1))
        self.assertNotEqual(private.get_group(1), plain.get_group(1))

    def test_a_submesh_equals_no_private_mesh_over_its_ranks(self) -> None:
        with private_groups():
            mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b"))
            other = DeviceMesh("cpu", list(range(16)), mesh_dim_names=("b",))
        first = mesh._get_all_submeshes("b")[0]
        self.assertEqual(first.mesh, other.mesh)
        self.assertNotEqual(first.get_group(), other.get_group())
        self.assertNotEqual(first, other)
        self.assertEqual(first, mesh._get_all_submeshes("b")[0])

    def test_private_universes_are_numbered_with_the_others(self) -> None:
        world, ranks = current_world(), RankMap.identity(64)
        plain = world.open_universe(ranks)
        private = world.open_universe(ranks, world.next_private(ranks))
        self.assertEqual([plain.number, private.number], [1, 2])
        self.assertNotEqual(private.private, world.next_private(ranks))


if __name__ == "__main__":
    run_tests()
