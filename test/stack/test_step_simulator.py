# Owner(s): ["oncall: distributed"]
"""Each step but an all-to-all by value, as step_simulator.py runs it: against what each rank should hold after it."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from step_simulator import REDUCE, is_right, regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllReduce, Divide, Embed, Narrow, ReduceScatter

SIZES = (2, 3)


def ends(old, new, shape=(5, 4)):
    return regions(old, shape, SIZES), regions(new, shape, SIZES)


@instantiate_parametrized_tests
class TestStepSimulator(TestCase):
    def check(self, *steps, to=None) -> None:
        self.assertTrue(is_right(steps, steps[0].before, to or steps[-1].after), msg=f"{steps}")

    @parametrize("op", [*REDUCE])
    def test_reductions(self, op) -> None:
        before, after = ends((0, op), (0, None))
        self.check(AllReduce(before, before, (1,), op), to=after)
        self.check(ReduceScatter(*ends((None, op), (None, 0)), (1,), op))
        self.check(ReduceScatter(*ends((op, op), (1, 1)), (0, 1), op))

    def test_gathers(self) -> None:
        self.check(AllGather(*ends((0, 0), (None, None)), (0, 1)))
        self.check(AllGather(*ends((0, 0), (0, None)), (1,)))
        self.check(AllGather(*ends((1, 0), (None, None)), (0, 1)))

    def test_local_steps(self) -> None:
        self.check(Narrow(*ends((0, None), (0, 1))))
        (shards, whole), terms = ends((0, 0), (None, None)), regions(("sum", "sum"), (5, 4), SIZES)
        self.check(Embed(shards, whole), to=terms)
        self.check(AllGather(shards, whole, (0, 1)), Divide(6), to=terms)

    def test_what_is_wrong_is_seen(self) -> None:
        before, after = ends((None, "sum"), (None, 0))
        self.assertFalse(is_right([ReduceScatter(before, after, (1,), "max")], before, after))
        self.assertFalse(is_right([Narrow(*ends((None, None), (None, 0)))], before, after))


if __name__ == "__main__":
    run_tests()
