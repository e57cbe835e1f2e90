# Owner(s): ["oncall: distributed"]
"""Which views have one group, and who ends it."""

import contextlib
import pickle
import threading
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh.universe import find_group


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

    def test_by_ranks_names_share(self) -> None:
        with config.patch(mesh_share_groups="ranks"):
            one, other = (init_device_mesh("cpu", (4, 16), mesh_dim_names=("a", "b")) for _ in range(2))
            renamed = one["b"]._unflatten(0, (16,), ("z",))
        self.assertEqual(renamed.get_group("z"), one.get_group("b"))
        self.assertNotEqual(other.get_group("b"), one.get_group("b"))


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


class TestSharedByDefault(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_views_share_the_group_of_an_axis(self) -> None:
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("world",))
        one, other = (mesh._unflatten(0, (4, 16), ("a", name)) for name in ("b", "c"))
        self.assertEqual(one.get_group("a"), other.get_group("a"))


class TestSharedByNone(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    @config.patch(mesh_share_groups="off", plan_redistribution=False)
    def test_a_gather_over_a_turned_mesh_is_in_its_order_or_refused(self) -> None:
        """As long as groups sort their ranks, that of a flattened view isn't taken for it."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        turned = DeviceMesh._concatenate([mesh["b"], mesh["a"]])
        turned._flatten("ba")
        whole = torch.arange(8)
        local = whole.chunk(2)[turned.get_local_rank("b")].chunk(2)[turned.get_local_rank("a")]
        held = DTensor.from_local(local, turned, (Shard(0), Shard(0)), run_check=False)
        with contextlib.suppress(KeyError):  # "their groups would not have the mesh's order"
            self.assertEqual(held.full_tensor(), whole)


class TestMeshAbort(TestCase):
    """In a world of 64 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
        shared = config.patch(mesh_share_groups="names")
        shared.__enter__()
        self.addCleanup(shared.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("pp", "dp", "tp"))

    def tearDown(self) -> None:
        dist.destroy_process_group()
        super().tearDown()

    def test_each_group_once(self) -> None:
        view = self.mesh["dp", "tp"]
        view._flatten("model")
        self.assertIs(view._unflatten(0, (4,), ("dp",)).get_group("dp"), self.mesh.get_group("dp"), msg="shared")
        groups = [self.mesh.get_group(name) for name in ("pp", "dp", "tp", "model")]
        aborted = []
        with mock.patch.object(dist.ProcessGroup, "abort", lambda group: aborted.append(group.group_name)):
            self.mesh.abort()
        named = {group.group_name for group in groups}
        self.assertEqual(len(aborted), len(set(aborted)))
        self.assertLessEqual(named, set(aborted))
        self.assertNotIn(dist.group.WORLD.group_name, aborted)
        self.assertNotIn(view._flatten("model").get_group().group_name, aborted, msg="made anew")

    def test_what_is_known_of_the_groups_goes_if_their_end_fails(self) -> None:
        """As it may where a peer died."""
        before = self.mesh.get_group("tp")
        with mock.patch.object(dist.ProcessGroup, "abort", mock.Mock(side_effect=RuntimeError("a peer died"))):
            with self.assertRaisesRegex(RuntimeError, "a peer died"):
                self.mesh.abort()
        self.assertNotIn(before.group_name, self.mesh._pg_registry)
        self.assertIsNone(find_group(before.group_name))

    def test_all_at_the_same_time(self) -> None:
        """The abort of one communicator may wait for another's: here each waits for all."""
        aborted: list[str] = []
        with mock.patch.object(dist.ProcessGroup, "abort", lambda group: aborted.append(group.group_name)):
            DeviceMesh("cpu", self.mesh.mesh, mesh_dim_names=("pp", "dp", "tp")).abort()
        all_are_there = threading.Barrier(len(aborted), timeout=20)
        with mock.patch.object(dist.ProcessGroup, "abort", lambda group: all_are_there.wait()):
            self.mesh.abort()
        self.assertGreater(len(aborted), 2)

    def test_a_submesh_is_refused(self) -> None:
        """One that shows other ranks, too: the groups that it has are those of the mesh that it is a part of."""
        for submesh in (self.mesh["tp"], *self.mesh._get_all_submeshes("tp")):
            with self.assertRaisesRegex(RuntimeError, "root mesh"):
                submesh.abort()


if __name__ == "__main__":
    run_tests()
