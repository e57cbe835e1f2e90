# Owner(s): ["oncall: distributed"]
"""Meshes whose groups nobody else uses."""

import itertools
import pickle

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh.rank_map import RankMap
from torch_overlay.distributed._mesh.state import is_apart
from torch_overlay.distributed._mesh.universe import current_world, private_groups


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

    def test_a_view_made_inside_has_groups_of_its_own(self) -> None:
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        outside = mesh._unflatten(0, (4, 16), ("a", "b"))
        with private_groups():
            inside = mesh._unflatten(0, (4, 16), ("a", "b"))
        self.assertNotEqual(inside.get_group("a"), outside.get_group("a"))
        self.assertTrue(is_apart(inside["b"]), msg="and so have its views")
        self.assertFalse(is_apart(outside))
        self.assertNotEqual(inside, outside)
        cut = [one._unflatten("b", (4, 4), ("c", "d")).get_group("d") for one in (inside, outside)]
        self.assertNotEqual(*cut)

    def test_two_views_with_other_groups_are_unequal(self) -> None:
        """Made inside, and made of a view that was made inside."""
        mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b"))
        with private_groups():
            inside, again = (mesh._unflatten("b", (4, 4), ("c", "d")) for _ in range(2))
        self.assertEqual(inside.get_group("a"), mesh.get_group("a"), msg="which was there")
        deeper = [inside._unflatten("d", (2, 2), ("e", "f")) for _ in range(2)]
        for one, other in ((inside, again), deeper):
            self.assertNotEqual(one.get_group(one.ndim - 1), other.get_group(one.ndim - 1))
            self.assertNotEqual(one, other)
        self.assertEqual(inside["a", "c"], inside["a", "c"])

    def test_a_flattened_view_has_one_name(self) -> None:
        mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))
        outside = mesh["a", "b"]._flatten("ab")
        with private_groups():
            self.assertIs(mesh["a", "b"]._flatten("ab"), outside)
            inside = mesh["b", "c"]._flatten("bc")
        self.assertTrue(is_apart(inside))
        self.assertIs(mesh["b", "c"]._flatten("bc"), inside)

    def test_views_side_by_side_are_equal_only_with_the_same_groups(self) -> None:
        mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b"))
        outside = mesh._unflatten("b", (4, 4), ("c", "d"))
        with private_groups():
            inside, again = (mesh._unflatten("b", (4, 4), ("c", "d")) for _ in range(2))
        join = DeviceMesh._concatenate
        beside = [join([mesh["a"], view["c"]]) for view in (outside, inside, again)]
        for one, other in itertools.combinations(beside, 2):
            self.assertNotEqual(one.get_group("c"), other.get_group("c"))
            self.assertNotEqual(one, other)
        both = beside[1]
        self.assertEqual(both["a"], mesh["a"])
        self.assertFalse(is_apart(both["a"]))
        self.assertEqual(join([both["a"], outside["c"]]), join([mesh["a"], outside["c"]]))

    def test_the_order_of_dims_says_nothing_of_their_groups(self) -> None:
        mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b"))
        outside = mesh._unflatten("b", (4, 4), ("c", "d"))
        with private_groups():
            inside = mesh._unflatten("b", (4, 4), ("c", "d"))
        join = DeviceMesh._concatenate
        both = join([mesh["a"], inside["c"]])
        turned, other = join([both["c"], both["a"]]), join([outside["c"], inside["a"]])
        self.assertNotEqual(turned.get_group("c"), other.get_group("c"))
        self.assertNotEqual(turned, other)
        self.assertEqual(turned, join([inside["c"], mesh["a"]]))

    def test_names_need_not_be_strings(self) -> None:
        mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=(1, 2))
        outside = mesh._unflatten(1, (4, 4), (3, 4))
        with private_groups():
            inside = mesh._unflatten(1, (4, 4), (3, 4))
        both = DeviceMesh._concatenate([mesh[(1,)], inside[(3,)]])
        self.assertEqual(both[(3,)], inside[(3,)])
        self.assertNotEqual(both[(3,)], outside[(3,)])
        self.assertEqual(both[(1,)], mesh[(1,)])

    def test_a_slice_may_show_a_flattened_view(self) -> None:
        mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))
        with private_groups():
            inside = mesh["b", "c"]._flatten("bc")
        self.assertEqual(mesh["bc"], inside)
        self.assertTrue(is_apart(mesh["a", "bc"]))
        self.assertFalse(is_apart(mesh["a", "bc"]["a"]))
        other = mesh._flatten("all")._unflatten(0, (4, 16), ("a", "bc"))
        self.assertNotEqual(other.get_group("bc"), inside.get_group())
        self.assertNotEqual(other["bc"], mesh["bc"])
        self.assertFalse(is_apart(other["bc"]))
        cut = [one._unflatten(0, (4, 4), ("x", "y")).get_group("x") for one in (other["bc"], mesh["bc"])]
        self.assertNotEqual(*cut)

    def test_loaded_it_has_its_own_groups_or_none(self) -> None:
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        mesh._unflatten(0, (4, 16), ("a", "b"))
        with private_groups():
            inside = mesh._unflatten(0, (4, 16), ("a", "b"))
        saved = pickle.dumps(inside)
        self.assertEqual(pickle.loads(saved).get_group("a"), inside.get_group("a"))
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        mesh._unflatten(0, (4, 16), ("a", "b"))
        with self.assertRaisesRegex(RuntimeError, "was loaded"):
            pickle.loads(saved).get_group("a")

    def make(self) -> DeviceMesh:
        """A view with new dims c and d and one that was there, a."""
        mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b"))
        with private_groups():
            return mesh._unflatten("b", (4, 4), ("c", "d"))

    def check(self, saved: bytes, inside: DeviceMesh) -> None:
        for name in ("a", "c", "d"):
            self.assertEqual(pickle.loads(saved).get_group(name), inside.get_group(name), msg=name)

    def test_dims_that_were_there_have_the_groups_of_the_mesh(self) -> None:
        with config.patch(mesh_share_groups="ranks"):
            inside = self.make()
            self.check(pickle.dumps(inside), inside)

    def test_loaded_on_another_rank_it_has_that_rank_s_groups(self) -> None:
        """Whose names are others."""
        inside = self.make()
        saved, part = pickle.dumps(inside), pickle.dumps(inside._get_all_submeshes("c")[1])
        self.check(saved, inside)
        self.assertEqual(pickle.loads(part).get_group(), inside.get_group("c"))
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=64)
        init_device_mesh("cpu", (16, 4), mesh_dim_names=("x", "y"))
        self.check(saved, self.make())

    def test_the_saved_name_leads_to_no_other_view(self) -> None:
        """Of two views made inside, the second has the name that the first had where it was saved."""
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        mesh._unflatten(0, (4, 16), ("a", "b"))
        with private_groups():
            saved = pickle.dumps(mesh._unflatten(0, (4, 16), ("a", "b")))
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        with private_groups():
            first, second = (mesh._unflatten(0, (4, 16), ("a", "b")) for _ in range(2))
        self.assertIn(second._dim_group_names[0], str(saved))
        self.assertEqual(pickle.loads(saved).get_group("a"), first.get_group("a"))


if __name__ == "__main__":
    run_tests()
