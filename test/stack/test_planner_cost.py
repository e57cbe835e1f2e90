# Owner(s): ["oncall: distributed"]
"""What a step costs follows from its bytes and its ranks."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost, arriving, collectives, leaving
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Narrow


def placed(*dims, shape=(16, 16)):
    """On a (2, 4) mesh."""
    return regions(dims, shape, (2, 4))


class TestCost(TestCase):
    def test_what_is_local_costs_nothing(self) -> None:
        step = Narrow(placed(None, None), placed(0, 1))
        self.assertEqual((collectives([step]), arriving(step), Cost().seconds(step, 4)), (0, 0, 0))

    def test_what_comes_and_what_goes(self) -> None:
        gather = AllGather(placed(None, 0), placed(None, None), (1,))
        self.assertEqual((arriving(gather), leaving(gather)), (192, 192))
        exchange = AllToAll(placed(None, 0), placed(None, 1), (1,))
        self.assertEqual((arriving(exchange), leaving(exchange)), (48, 48))

    @parametrize("shape", [(16, 16), (5, 3)])
    def test_no_rank_of_an_all_to_all_sends_or_gets_more(self, shape) -> None:
        for ends in pairs(mesh_dims=2):
            step = AllToAll(*(placed(*dims, shape=shape) for dims in ends), (0, 1))
            step = AllToAll(step.before, step.after, step.axes, diagonals=step.exchange.diagonals())
            out, into = [], []
            for own, place in enumerate(step.members((0, 0))):
                for pieces, most in ((step.sends(place), out), (step.receives(place), into)):
                    most.append(sum(piece.box.elements for piece in pieces if piece.member != own))
            for said, true in ((leaving(step), max(out)), (arriving(step), max(into))):
                self.assertGreaterEqual(said, true, msg=f"{ends}")
                self.assertTrue(said == true or shape != (16, 16), msg=f"{ends}: {said} of {true}")

    def test_seconds_are_latency_and_bytes(self) -> None:
        gather = AllGather(placed(None, 0), placed(None, None), (1,))
        exchange = AllToAll(placed(None, 0), placed(None, 1), (1,))
        bare = Cost(latency=0.0, bandwidth=1.0)
        self.assertEqual(bare.seconds(gather, 4), 192 * 4)
        self.assertEqual(bare.seconds(exchange, 4), 1.25 * 48 * 4)
        self.assertEqual(Cost(latency=2.0, bandwidth=float("inf")).seconds(gather, 4), 2.0 * (1 + 2) / 2)

    def test_more_bytes_and_more_ranks_cost_more(self) -> None:
        seconds = []
        for sizes in ((2,), (4,), (8,)):
            (step, more) = (AllGather(*(regions(dim, (n, 8), sizes) for dim in ((0,), (None,))), (0,)) for n in (8, 16))
            self.assertLess(Cost().seconds(step, 4), Cost().seconds(more, 4))
            self.assertLess(Cost().seconds(step, 4), Cost().seconds(step, 8))
            seconds.append(Cost(bandwidth=float("inf")).seconds(step, 4))
        self.assertEqual([at / seconds[0] for at in seconds], [1.0, 1.5, 2.0])

    def test_of_equal_plans_the_first_is_taken(self) -> None:
        gather = AllGather(placed(None, 0), placed(None, None), (1,))
        plans = [(gather,), (gather, Narrow(placed(None, None), placed(0, None)))]
        self.assertIs(Cost().fastest(plans, 4), plans[0])
        twice = (
            AllGather(placed(0, 0), placed(0, None), (1,)),
            AllGather(placed(0, None), placed(None, None), (0,)),
        )
        once = (AllGather(placed(0, 0), placed(None, None), (0, 1)),)
        self.assertIs(Cost().fastest([twice, once], 4), once)


instantiate_parametrized_tests(TestCost)
if __name__ == "__main__":
    run_tests()
