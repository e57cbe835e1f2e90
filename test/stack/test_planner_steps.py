# Owner(s): ["oncall: distributed"]
"""What local steps cut out of the local tensor, and where they put it."""

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import Divide, Embed, Narrow


def regions(dims, shape) -> Regions:
    """On a (2, 2) mesh."""
    return Regions.of(dims, (None, None), shape, (2, 2))


class TestSteps(TestCase):
    """Steps as values."""

    def test_a_narrow_finds_what_is_wanted_in_the_local_tensor(self) -> None:
        step = Narrow(regions((0, None), (5, 4)), regions((0, 1), (5, 4)))
        self.assertEqual([*step.box((1, 1))], [(0, 2), (2, 2)])
        nothing = Narrow(regions((None, None), (1, 4)), regions((0, None), (1, 4)))
        self.assertEqual([*nothing.box((1, 0))], [(0, 0), (0, 4)])

    def test_an_embedded_shard_lies_where_it_was(self) -> None:
        step = Embed(regions((0, 1), (5, 4)), regions((None, 1), (5, 4)))
        self.assertEqual([*step.box((1, 1))], [(3, 0), (2, 2)])
        nothing = Embed(regions((0, None), (1, 4)), regions((None, None), (1, 4)))
        self.assertEqual([*nothing.box((1, 0))], [(0, 0), (0, 4)])

    def test_local_steps_are_values(self) -> None:
        ends = regions((None, None), (4, 4)), regions((0, None), (4, 4))
        again = regions((None, None), (4, 4)), regions((0, None), (4, 4))
        self.assertEqual({Divide(2), Narrow(*ends)}, {Divide(2), Narrow(*again)})


if __name__ == "__main__":
    run_tests()
