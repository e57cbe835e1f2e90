# Owner(s): ["oncall: distributed"]
"""What ranks send in an all-to-all is what others receive, and nothing is missing after it."""

import itertools

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from step_simulator import pairs, regions
from torch_overlay.distributed.tensor._planner.senders import Exchange
from torch_overlay.distributed.tensor._planner.steps import AllToAll


def cells(box, held=None) -> list[tuple[int, ...]]:
    """The elements of a box, by their indices; of a box inside ``held``, which counts from its start."""
    origin = held.start if held is not None else (0,) * len(box.start)
    ranges = [range(o + s, o + s + n) for o, s, n in zip(origin, box.start, box.length, strict=True)]
    return [*itertools.product(*ranges)]


class TestExchange(TestCase):
    """All-to-alls over all mesh dims, as values."""

    @parametrize("sizes", [(2, 2), (2, 3)])
    @parametrize("shape", [(4, 6), (5, 3), (1, 2)])
    @parametrize("balanced", [False, True])
    def test_an_all_to_all_brings_each_element_once(self, sizes, shape, balanced) -> None:
        """From the nearest replica, or from one on a diagonal."""
        places = [*itertools.product(*map(range, sizes))]
        for old, new in pairs(mesh_dims=2):
            before, after = regions(old, shape, sizes), regions(new, shape, sizes)
            step = AllToAll(before, after, (0, 1))
            if balanced:
                step = AllToAll(before, after, (0, 1), diagonals=step.exchange.diagonals())
            counts = [sum(len(pieces(place)) for place in places) for pieces in (step.sends, step.receives)]
            self.assertEqual(*counts, msg=f"{old} to {new}: what is sent and what is received")
            for place in places:
                wanted, came = after.box(place), []
                for piece in step.receives(place):
                    sender = step.members(place)[piece.member]
                    (sent,) = [one for one in step.sends(sender) if step.members(sender)[one.member] == place]
                    got = cells(piece.box, wanted)
                    self.assertEqual(
                        got, cells(sent.box, before.box(sender)), msg=f"{old} to {new}, {sender} to {place}"
                    )
                    came += got
                self.assertEqual(sorted(came), cells(wanted), msg=f"{old} to {new} at {place}")

    def test_on_a_diagonal_each_rank_sends_to_one(self) -> None:
        exchange = Exchange(*(regions(spec, (16, 1), (4, 4)) for spec in ((None, 0), (0, None))), (0, 1))
        for diagonals, most in (((), 4), (exchange.diagonals(), 1)):
            step = AllToAll(exchange.before, exchange.after, exchange.axes, diagonals=diagonals)
            self.assertEqual(max(len(step.sends(place)) for place in step.members((0, 0))), most)


instantiate_parametrized_tests(TestExchange)

if __name__ == "__main__":
    run_tests()
