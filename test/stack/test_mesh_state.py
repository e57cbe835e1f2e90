# Owner(s): ["oncall: distributed"]
"""What all views of a root mesh have in common, the configuration, and the table of groups."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh.rank_map import RankMap
from torch_overlay.distributed._mesh.state import read_mesh
from torch_overlay.distributed._mesh.universe import (
    GroupTable,
    Key,
    Kind,
    current_world,
    get_settings,
    makes_communicators,
    members_create,
)


class TestMeshRanks(TestCase):
    def test_ranks_are_whole_numbers_each_once(self) -> None:
        self.assertEqual(read_mesh([[3, 1], [2, 0]]).ranks(3), [3, 1, 2, 0])
        for wrong in ([0, 0], [0, 1.5], [], [[], []], torch.empty(2, device="meta"), [0, 1 << 40]):
            with self.assertRaises(ValueError, msg=f"{wrong}"):
                read_mesh(wrong)


class TestGroupSettings(TestCase):
    def test_what_is_no_choice_is_refused(self) -> None:
        names = ("mesh_share_groups", "mesh_create_groups", "mesh_joint_groups")
        for name in names:
            with config.patch(**{name: "nothing"}), self.assertRaisesRegex(ValueError, f"{name} is one of .*'nothing'"):
                get_settings()

    def test_members_make_groups_alone_where_the_backend_lets_them(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        world = dist.group.WORLD
        self.assertTrue(members_create(world, None))
        self.assertFalse(members_create(world, "cpu:mpi,cuda:nccl"))
        self.assertFalse(makes_communicators(world))
        with config.patch(mesh_create_groups="world"):
            self.assertFalse(members_create(world, None))


class TestGroupTable(TestCase):
    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())

    def _key(self, ranks, name="tp", override=(None, None)) -> Key:
        return Key(tuple(ranks), Kind.of(override), name)

    def _make(self, copies):
        self.made += copies
        return [dist.new_group(ranks) if 1 in ranks else None for ranks in copies]

    def test_what_was_made_is_found(self) -> None:
        table, self.made = GroupTable(), []
        keys = [self._key([0, 1]), self._key([2, 3])]
        first = table.get_or_make(keys[:1], self._make)
        both = table.get_or_make(keys, self._make)
        self.assertEqual(self.made, [[0, 1], [2, 3]], msg="each once")
        self.assertIs(both[0], first[0])
        self.assertEqual(dist.get_process_group_ranks(both[0].group), [0, 1])
        self.assertIsNone(both[1].group, msg="this rank isn't in it")
        for other in (self._key([1, 0]), self._key([0, 1], "ep"), table.unused_key(keys[0])):
            self.assertNotEqual(table.get_or_make([other], self._make)[0].group_name, first[0].group_name)

    def test_a_group_that_is_gone_is_an_error(self) -> None:
        table, self.made = GroupTable(), []
        key = self._key([0, 1])
        dist.destroy_process_group(table.get_or_make([key], self._make)[0].group)
        with self.assertRaisesRegex(RuntimeError, r"process group of a mesh over ranks \[0, 1\] was destroyed here"):
            table.get_or_make([key], self._make)
        table.forget_gone(key)
        self.assertIsNotNone(table.get_or_make([key], self._make)[0].group, msg="its members make it again")


class TestUniverses(TestCase):
    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def test_universes_are_numbered_alike_on_all_ranks(self) -> None:
        world, ranks = current_world(), RankMap.identity(8)
        one, other = (world.open_universe(ranks) for _ in range(2))
        self.assertEqual([one.number, other.number], [1, 2])
        self.assertEqual(world.open_universe(RankMap([1, 0])).number, 1, msg="over other ranks")
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.assertIsNot(current_world(), world)


if __name__ == "__main__":
    run_tests()
