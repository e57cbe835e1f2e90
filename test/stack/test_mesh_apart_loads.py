# Owner(s): ["oncall: distributed"]
"""A view that was made in a block of private_groups, pickled and loaded: more of TestPrivateView."""

import pickle

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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


if __name__ == "__main__":
    run_tests()
