# Owner(s): ["oncall: distributed"]
"""Groups are found by what makes two of them equal, alike on all their members."""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._group_table import GroupTable, Key, Kind
from torch_overlay.distributed._member_names import MemberNames, compact
from torch_overlay.distributed._rank_map import RankMap
from torch_overlay.distributed._universe import current_world


class TestGroupTable(TestCase):
    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())

    def _key(self, ranks, lane="tp", override=(None, None)) -> Key:
        return Key(compact(ranks), Kind.of(override), lane)

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
        for other in (self._key([1, 0]), self._key([0, 1], "ep"), table.next_number(keys[0])):
            self.assertNotEqual(table.get_or_make([other], self._make)[0].group_name, first[0].group_name)

    def test_a_group_that_is_gone_is_an_error(self) -> None:
        table, self.made = GroupTable(), []
        key = self._key([0, 1])
        dist.destroy_process_group(table.get_or_make([key], self._make)[0].group)
        with self.assertRaisesRegex(RuntimeError, "was destroyed here"):
            table.get_or_make([key], self._make)
        table.forget_gone(key)
        self.assertIsNotNone(table.get_or_make([key], self._make)[0].group, msg="its members make it again")

    def test_options_count_by_value(self) -> None:
        one, same, longer = (Backend.Options("fake", timedelta(seconds=seconds)) for seconds in (60, 60, 120))
        self.assertEqual(Kind.of(("fake", one)), Kind.of((None, same)))
        self.assertNotEqual(Kind.of(("fake", one)), Kind.of(("fake", longer)))
        self.assertNotEqual(Kind.of(("fake", one)), Kind.of(("fake", None)))

    def test_members_agree_on_names_whatever_else_they_made(self) -> None:
        one, other = MemberNames(), MemberNames()
        one.next([0, 2])
        first = one.next([0, 1])
        self.assertEqual(first, other.next([0, 1]))
        self.assertNotEqual(first, one.next([0, 1]), msg="another group")
        self.assertNotEqual(first, other.next([1, 0]), msg="another order")

    def test_universes_are_numbered_alike_on_all_ranks(self) -> None:
        world, ranks = current_world(), RankMap.identity(8)
        one, other = (world.open_universe(ranks, None) for _ in range(2))
        private = world.open_universe(ranks, world.next_private(ranks))
        self.assertEqual([one.number, other.number, private.number], [1, 2, 3])
        self.assertIs(world.find_universe(RankMap(range(8)), None, 2), other)
        self.assertIs(world.find_universe(ranks, None, 9), one, msg="the first, where that number isn't here")
        self.assertIs(world.find_universe(ranks, private.private, 3), private)
        self.assertIsNone(world.find_universe(RankMap([1, 0]), None, 1))
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.assertIsNot(current_world(), world)


if __name__ == "__main__":
    run_tests()
