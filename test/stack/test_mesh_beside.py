# Owner(s): ["oncall: distributed"]
"""A view with dims of several views shares what each of them shares: more of TestPrivateView."""

import itertools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


if __name__ == "__main__":
    run_tests()
