# Owner(s): ["oncall: distributed"]
"""Over which sets of mesh dims a plan may communicate."""

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.groups import Groups


class TestGroups(TestCase):
    def test_groups_within_and_between_sets_of_mesh_dims(self) -> None:
        sizes = (2, 3, 4)
        some, every = Groups.of(((0, 2), (1, 2), (0, 1, 2)), sizes), Groups.of(None, sizes)
        self.assertEqual(some.within((0, 1)), [(1,), (0,)])
        self.assertEqual(some.within((0, 1, 2))[:3], [(0, 1, 2), (1, 2), (0, 2)])
        self.assertEqual(every.within((0, 1)), [(0, 1), (1,), (0,)])
        self.assertEqual(some.between((2,), (0, 1, 2)), [(2,), (0, 2), (1, 2), (0, 1, 2)])
        self.assertEqual(every.between((2,), (0, 1, 2)), [(2,), (0, 1, 2)])

    def test_mesh_dims_are_covered_by_the_biggest_groups(self) -> None:
        for groups, found in ((None, [(0, 1, 2)]), (((0, 2), (1, 2)), [(0, 2), (1,)]), ((), [(0,), (1,), (2,)])):
            self.assertEqual(Groups.of(groups, (2, 2, 2)).cover((0, 1, 2)), found)

    def test_single_mesh_dims_always_have_a_group(self) -> None:
        some = Groups.of(((0, 2), (1, 2)), (2, 1, 4))
        self.assertEqual(some.axes, {(0, 2)})
        self.assertEqual([some.has(axes) for axes in ((), (2,), (2, 0), (0, 1))], [True, True, True, False])


if __name__ == "__main__":
    run_tests()
