# Owner(s): ["oncall: distributed"]
"""A move is one collective, or none, and leads from one end to the other."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import SIZES, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import crossed, move
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Collective, Narrow


def moved(source, target, shape=(16, 16)):
    """The steps, and the regions from which and to which they should lead."""
    before, after = (regions(spec, shape) for spec in (source, target))
    return move(before, after, Groups.of(None, SIZES), 4, Cost()), before, after


class TestMoves(TestCase):
    """All 729 pairs on a (2, 2, 2) mesh, all groups at hand."""

    @parametrize("shape", [(16, 16), (5, 3)])
    def test_every_rank_gets_its_box(self, shape) -> None:
        for ends in pairs():
            steps, before, after = moved(*ends, shape)
            self.assertTrue(is_right(steps, before, after), msg=f"{ends}: {steps}")
            self.assertLessEqual(collectives(steps), 1)

    def test_replicas_at_both_ends_take_no_part(self) -> None:
        for ends in pairs():
            steps, before, after = moved(*ends)
            talking = {axis for step in steps if isinstance(step, Collective) for axis in step.axes}
            self.assertLessEqual(crossed(before, after), talking)
            self.assertLessEqual(talking, before.sharded | after.sharded)

    @parametrize(
        "source, target, kinds",
        [
            ((0, 0, 1), (0, None, 1), [AllGather]),
            ((None, 0, 1), (0, None, 1), [AllToAll]),
            ((None, 0, None), (1, None, None), [Narrow, AllGather]),
            ((None, None, 1), (0, None, 1), [Narrow]),
            ((0, 1, None), (1, 0, None), [AllToAll]),
        ],
    )
    def test_of_which_steps_it_is(self, source, target, kinds) -> None:
        self.assertEqual([*map(type, moved(source, target)[0])], kinds)

    @parametrize("rows, kind", [(8, AllGather), (7, AllGather), (5, AllToAll), (1, AllToAll)])
    def test_a_gather_has_little_padding(self, rows, kind) -> None:
        (step,) = moved((0, 0, 0), (None, None, None), (rows, 1))[0]
        self.assertIs(type(step), kind)


instantiate_parametrized_tests(TestMoves)

if __name__ == "__main__":
    run_tests()
