# Owner(s): ["oncall: distributed"]
"""Axes over the same ranks share one process group, and each rank makes only the groups that it is in."""

import pickle
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config


class TestSharedGroups(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_on = config.patch(mesh_share_groups="names")
        switched_on.__enter__()
        self.addCleanup(switched_on.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
        patched = mock.patch.object(distributed_c10d, "new_group", wraps=distributed_c10d.new_group)
        self.made = patched.start()
        self.addCleanup(patched.stop)

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_one_call_for_each_axis(self) -> None:
        init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))
        calls = [call.kwargs for call in self.made.call_args_list]
        asked = [said["ranks"] for said in calls if said["group_desc"] in ("mesh_a", "mesh_b", "mesh_c")]
        self.assertEqual([len(ranks) for ranks in asked], [4, 4, 4])
        self.assertTrue(all(5 in ranks for ranks in asked))

    def test_an_axis_has_one_group_in_all_views(self) -> None:
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        one = mesh._unflatten(0, (4, 16), ("a", "b"))
        before = self.made.call_count
        other = mesh._unflatten(0, (4, 16), ("a", "z"))
        self.assertEqual(one.get_group("a"), other.get_group("a"))
        self.assertNotEqual(one.get_group("b"), other.get_group("z"))
        self.assertEqual(self.made.call_count, before + 1)

    def test_two_meshes_share_nothing(self) -> None:
        one, other = (init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b")) for _ in range(2))
        self.assertEqual(one, other)
        self.assertNotEqual(one.get_group("b"), other.get_group("b"))

    def test_the_world_serves_the_axis_that_is_the_world(self) -> None:
        mesh = init_device_mesh("cpu", (64,))
        self.assertEqual(mesh.get_group(), dist.group.WORLD)
        self.made.assert_not_called()

    def test_another_order_is_another_group(self) -> None:
        plain = init_device_mesh("cpu", (8, 8), mesh_dim_names=("a", "b"))
        turned = DeviceMesh(
            "cpu", [[8 * i + j for j in reversed(range(8))] for i in range(8)], mesh_dim_names=("a", "b")
        )
        self.assertNotEqual(turned.get_group("b"), plain.get_group("b"))
        self.assertEqual(dist.get_process_group_ranks(turned.get_group("b")), list(reversed(range(8))))

        loaded = pickle.loads(pickle.dumps(turned))
        self.assertEqual(loaded.get_group("b"), turned.get_group("b"))

    def test_ranks_and_world_share_more(self) -> None:
        shared = {}
        for policy in ("ranks", "world"):
            with config.patch(mesh_share_groups=policy):
                one, other = (init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b")) for _ in range(2))
                renamed = one["b"]._unflatten(0, (16,), ("z",))
                groups = [mesh.get_group(name) for mesh, name in ((one, "b"), (renamed, "z"), (other, "b"))]
                shared[policy] = [group == groups[0] for group in groups[1:]]
        self.assertEqual(shared, {"ranks": [True, False], "world": [True, True]})


if __name__ == "__main__":
    run_tests()
