# Owner(s): ["oncall: distributed"]
"""A move is one collective, or none, and leads from one end to the other."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.cost import Cost, collectives
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.moves import crossed, move
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import Collective

SIZES = (2, 2, 2)


def ends(shape):
    """Every pair of ways to shard two tensor dims over three mesh dims."""
    made = [Regions.of(dims, (None,) * 3, shape, SIZES) for dims in itertools.product((None, 0, 1), repeat=3)]
    return itertools.product(made, repeat=2)


class TestMoves(TestCase):
    """All 729 pairs on a (2, 2, 2) mesh."""

    @parametrize("shape", [(16, 16), (5, 3)])
    def test_one_collective_leads_there(self, shape) -> None:
        for before, after in ends(shape):
            steps = move(before, after, Groups.of(None, SIZES), 4, Cost())
            self.assertLessEqual(collectives(steps), 1)
            for one, other in itertools.pairwise(steps):
                self.assertEqual(one.after, other.before)
            if steps:
                self.assertEqual((steps[0].before, steps[-1].after), (before, after))
            else:
                self.assertEqual(before, after)

    def test_only_ranks_that_lack_something_talk(self) -> None:
        for before, after in ends((16, 16)):
            talking = {
                a for s in move(before, after, Groups.of(None, SIZES), 4, Cost()) for a in getattr(s, "axes", ())
            }
            self.assertLessEqual(crossed(before, after), talking)
            self.assertLessEqual(talking, before.sharded | after.sharded)

    def test_without_joint_groups_each_collective_is_over_one_mesh_dim(self) -> None:
        for before, after in ends((16, 16)):
            for step in move(before, after, Groups.of((), SIZES), 4, Cost()):
                if isinstance(step, Collective):
                    self.assertEqual(len(step.axes), 1)


instantiate_parametrized_tests(TestMoves)

if __name__ == "__main__":
    run_tests()
