# Owner(s): ["oncall: distributed"]
"""What a step costs follows from its bytes, its ranks and the speed of its mesh dims."""

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.cost import Cost, arriving, collectives, leaving
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Narrow

SIZES = (2, 4)


def regions(dims, shape=(16, 16)) -> Regions:
    return Regions.of(dims, (None, None), shape, SIZES)


class TestCost(TestCase):
    def test_what_is_local_costs_nothing(self) -> None:
        step = Narrow(regions((None, None)), regions((0, 1)))
        self.assertEqual((collectives([step]), arriving(step), Cost().seconds(step, 4)), (0, 0, 0))

    def test_what_comes_and_what_goes(self) -> None:
        gather = AllGather(regions((None, 0)), regions((None, None)), (1,))
        self.assertEqual((arriving(gather), leaving(gather)), (192, 192))
        exchange = AllToAll(regions((None, 0)), regions((None, 1)), (1,))
        self.assertEqual((arriving(exchange), leaving(exchange)), (48, 48))

    def test_seconds_are_latency_and_bytes(self) -> None:
        gather = AllGather(regions((None, 0)), regions((None, None)), (1,))
        exchange = AllToAll(regions((None, 0)), regions((None, 1)), (1,))
        bare = Cost(latency=0.0, bandwidth=1.0)
        self.assertEqual(bare.seconds(gather, 4), 192 * 4)
        self.assertEqual(bare.seconds(exchange, 4), 1.25 * 48 * 4)
        self.assertEqual(Cost(latency=2.0, bandwidth=float("inf")).seconds(gather, 4), 2.0 * (1 + 2) / 2)

    def test_a_joint_group_is_as_slow_as_its_slowest_dim(self) -> None:
        known = Cost.of(("host", "gpu"), [("host", 1.0, 5.0), ("gpu", 100.0, 1.0)])
        both = AllGather(regions((0, 0)), regions((None, None)), (0, 1))
        self.assertEqual(known.seconds(both, 1), 5.0 * (1 + 3) / 2 + 224)
        self.assertEqual(known.by_speed((0, 1))[0], (frozenset({0}), frozenset({1})))

    def test_of_equal_plans_the_first_is_taken(self) -> None:
        gather = AllGather(regions((None, 0)), regions((None, None)), (1,))
        plans = [(gather,), (gather, Narrow(regions((None, None)), regions((0, None))))]
        self.assertIs(Cost().fastest(plans, 4), plans[0])
        twice = (
            AllGather(regions((0, 0)), regions((0, None)), (1,)),
            AllGather(regions((0, None)), regions((None, None)), (0,)),
        )
        once = (AllGather(regions((0, 0)), regions((None, None)), (0, 1)),)
        self.assertIs(Cost().fastest([twice, once], 4), once)


if __name__ == "__main__":
    run_tests()
