# Owner(s): ["oncall: distributed"]
"""A view that is made in a block of private_groups shares no group with other views, nor do its views."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh_state import is_apart
from torch_overlay.distributed._universe import private_groups


class TestPrivateView(TestCase):
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


if __name__ == "__main__":
    run_tests()
