# Owner(s): ["oncall: distributed"]
"""The terms of a norm are read as sums of powers."""

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._planner.regions import NotPlanned
from torch_overlay.distributed.tensor._specs import norm_ended, read_cuts


class TestNorms(TestCase):
    """No process group."""

    def test_a_norm_is_a_sum_of_powers(self) -> None:
        norm = _NormPartial(2)
        self.assertEqual(read_cuts((norm,), None, 1, (2,)), read_cuts((Partial("sum"),), None, 1, (2,)))
        self.assertEqual(norm_ended((norm, norm), (Replicate(), norm), (2, 2)), norm)
        self.assertIsNone(norm_ended((norm, Shard(0)), (norm, Replicate()), (2, 2)))
        with self.assertRaisesRegex(NotPlanned, "beside terms of another"):
            norm_ended((norm, Partial()), (Replicate(), Replicate()), (2, 2))

    def test_over_one_rank_nothing_ends(self) -> None:
        norm = _NormPartial(2)
        self.assertIsNone(norm_ended((norm, norm), (Replicate(), norm), (1, 2)))

    def test_terms_are_not_made(self) -> None:
        norm = _NormPartial(2)
        for source, target in (
            ((Replicate(),), (norm,)),
            ((norm,), (Partial(),)),
            ((norm, norm), (Replicate(), Partial())),
            ((norm, Replicate()), (Replicate(), Partial())),
        ):
            with self.assertRaisesRegex(NotPlanned, "from something else"):
                norm_ended(source, target, (2,) * len(source))


if __name__ == "__main__":
    run_tests()
