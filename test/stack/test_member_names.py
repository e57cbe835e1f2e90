# Owner(s): ["oncall: distributed"]
"""A group that only its members make has one name on all of them."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._member_names import MemberNames


class TestMemberNames(TestCase):
    def test_members_agree_on_names_whatever_else_they_made(self) -> None:
        one, other = MemberNames(), MemberNames()
        one.next([0, 2])
        first = one.next([0, 1])
        self.assertEqual(first, other.next([0, 1]))
        self.assertNotEqual(first, one.next([0, 1]), msg="another group")
        self.assertNotEqual(first, other.next([1, 0]), msg="another order")
        self.assertEqual(one.next([0, 3]), other.next(list(torch.tensor([0, 3]))), msg="ranks of another type")

    def test_a_group_is_named_by_how_often_its_members_made_one(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        dist.new_group([0, 1, 2], use_local_synchronization=True)  # of which rank 3 knows nothing
        names = MemberNames()  # as rank 3 counts
        for _ in range(2):
            made = dist.new_group([1, 3], use_local_synchronization=True)
            self.assertEqual(made.group_name, names.next([1, 3]))


if __name__ == "__main__":
    run_tests()
