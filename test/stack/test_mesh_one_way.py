# Owner(s): ["oncall: distributed"]
"""With sharing off, too, the members of a group make it, in the order of the mesh."""

import pickle
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config


class TestOneWay(TestCase):
    """In a world of 16 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_off = config.patch(mesh_share_groups="off")
        switched_off.__enter__()
        self.addCleanup(switched_off.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
        self.addCleanup(dist.destroy_process_group)

    def test_a_permuted_mesh_has_groups_in_its_order(self) -> None:
        mesh = DeviceMesh("cpu", [[3, 2, 1, 0], [7, 6, 5, 4]], mesh_dim_names=("dp", "tp"))
        self.assertEqual(dist.get_process_group_ranks(mesh.get_group("tp")), [7, 6, 5, 4])
        self.assertEqual(dist.get_process_group_ranks(mesh.get_group("dp")), [1, 5])

    def test_a_rank_asks_for_its_own_groups_only(self) -> None:
        with mock.patch.object(distributed_c10d, "new_group", wraps=distributed_c10d.new_group) as made:
            init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
            asked = [list(call.kwargs["ranks"]) for call in made.call_args_list]
            self.assertEqual(asked, [[1, 5, 9, 13], [4, 5, 6, 7]])
            DeviceMesh("cpu", [0, 1, 2, 3])
            self.assertEqual(made.call_count, 2, msg="this rank is outside")

    def test_each_view_has_groups_of_its_own(self) -> None:
        mesh = init_device_mesh("cpu", (16,), mesh_dim_names=("world",))
        one, other = (mesh._unflatten(0, (4, 4), ("a", "b")) for _ in range(2))
        for name in ("a", "b"):
            self.assertNotEqual(one.get_group(name), other.get_group(name))

    def test_a_loaded_mesh_finds_a_users_group_in_any_order(self) -> None:
        dp, tp = dist.new_group([5, 7]), dist.new_group([5, 4])
        mesh = DeviceMesh.from_group([dp, tp], "cpu", mesh=[[5, 4], [7, 6]], mesh_dim_names=("dp", "tp"))
        self.assertEqual(dist.get_process_group_ranks(tp), [4, 5], msg="new_group sorts")
        self.assertEqual(pickle.loads(pickle.dumps(mesh)).get_group("tp"), tp)


if __name__ == "__main__":
    run_tests()
