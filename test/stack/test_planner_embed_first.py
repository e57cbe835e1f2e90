# Owner(s): ["oncall: distributed"]
"""A shard becomes a term before the other steps where that is faster."""

from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from planner_simulator import MOVED, is_right, pairs, regions
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.groups import Groups
from torch_overlay.distributed.tensor._planner.plan import _embed_first, plan
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, Embed, Narrow

SIZES = (2, 2)


class TestEmbedFirst(TestCase):
    @parametrize(
        "source, target, kinds",
        [
            ((None, 0), (0, "sum"), [Embed, Narrow]),
            ((0, 0), (None, "sum"), [Embed, AllGather]),
            ((0, 0), ("sum", 0), [AllGather, Embed, Narrow]),
            ((0, 1), (1, "sum"), [Embed, AllToAll]),
        ],
    )
    def test_where_it_comes_first(self, source, target, kinds) -> None:
        before, after = (regions(ends, (64, 64), SIZES) for ends in (source, target))
        self.assertEqual([*map(type, plan(before, after, 4, ()))], kinds)

    @parametrize("groups", [None, ()])
    def test_every_rank_ends_with_its_part_or_its_term(self, groups) -> None:
        """Whether it is the best or not."""
        for source, target in pairs((*MOVED, "sum"), (*MOVED, "sum"), 2):
            before, after = (regions(ends, (5, 4), SIZES) for ends in (source, target))
            made = after.pending - before.pending
            if made and made <= before.sharded:
                steps = _embed_first(before, after, made, Groups.of(groups, SIZES), 4, Cost())
                self.assertTrue(is_right(steps, before, after), msg=f"{source} to {target}: {steps}")

    def test_it_takes_no_more_collectives(self) -> None:
        """Zeros last would be three collectives that bring less: gathers over the third and the second mesh dim, then
        an all-to-all."""
        ends = ((0, 0, 0), (None, 0, "sum"))
        before, after = (regions(spec, (1 << 10, 1 << 10), (2, 2, 2)) for spec in ends)
        self.assertEqual([*map(type, plan(before, after, 4, ()))], [Embed, AllGather, AllToAll])


instantiate_parametrized_tests(TestEmbedFirst)

if __name__ == "__main__":
    run_tests()
