# Owner(s): ["oncall: distributed"]
"""The chunks of a tensor dim before and after a redistribution, and what they have in common."""

import itertools

from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.regions import Regions, overlaps


class TestOverlaps(TestCase):
    def test_overlaps_cover_a_dim_once(self) -> None:
        cuts = [*itertools.product((None, 0), repeat=2)]
        for length, old, new in itertools.product(range(8), cuts, cuts):
            before, after = (Regions.of(dims, (None, None), (length,), (2, 3)) for dims in (old, new))
            seen = []
            for elements, held, wanted in overlaps(before, after, 0):
                spans = [range(start, start + n) for start, n in (before.span(0, held), after.span(0, wanted))]
                common = [place for place in spans[0] if place in spans[1]]
                self.assertEqual(len(common), elements, msg=f"{old} to {new}: {held} to {wanted}")
                seen += common
            self.assertEqual(seen, [*range(length)], msg=f"{old} to {new}")


if __name__ == "__main__":
    run_tests()
