# Owner(s): ["oncall: distributed"]
"""Groups are found by what makes two of them equal, alike on all their members."""

import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._group_kind import Kind
from torch_overlay.distributed._group_table import GroupTable, Key
from torch_overlay.distributed._member_names import compact


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
        with self.assertRaisesRegex(RuntimeError, r"process group of a mesh over ranks \[0, 1\] was destroyed here"):
            table.get_or_make([key], self._make)
        table.forget_gone(key)
        self.assertIsNotNone(table.get_or_make([key], self._make)[0].group, msg="its members make it again")


if __name__ == "__main__":
    run_tests()
