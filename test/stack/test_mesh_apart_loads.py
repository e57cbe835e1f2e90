# Owner(s): ["oncall: distributed"]
"""A view that was made in a block of private_groups, pickled and loaded: more of TestPrivateView."""

import pickle

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
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

    def test_loaded_it_has_its_own_groups_or_none(self) -> None:
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        mesh._unflatten(0, (4, 16), ("a", "b"))
        with private_groups():
            inside = mesh._unflatten(0, (4, 16), ("a", "b"))
        saved = pickle.dumps(inside)
        self.assertEqual(pickle.loads(saved).get_group("a"), inside.get_group("a"))
        with config.patch(mesh_share_groups="world"), private_groups():
            among_all = mesh._unflatten(0, (4, 16), ("a", "b"))
        self.assertEqual(pickle.loads(pickle.dumps(among_all)).get_group("a"), among_all.get_group("a"))
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
        with config.patch(mesh_share_groups="world"):
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
