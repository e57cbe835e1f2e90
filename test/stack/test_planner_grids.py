# Owner(s): ["oncall: distributed"]
"""A grid packs the pieces of a step as its list of pieces does, and puts them in their places."""

import dataclasses
import itertools

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.grids import grids
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, ReduceScatter

SIZES = (2, 3)


def cut(tensor, box):
    """A view of a box; a piece's box counts from the start of what holds it."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def all_to_all(source, target, shape, axes=(0, 1)) -> AllToAll:
    before, after = (Regions.of(dims, (None, None), shape, SIZES) for dims in (source, target))
    return AllToAll(before, after, axes)


class TestGrids(TestCase):
    @parametrize(
        "source, target, axes",
        [
            ((0, 0), (1, 1), (0, 1)),
            ((0, 0), (None, 1), (0, 1)),
            ((0, 0), (1, None), (0, 1)),
            ((0, 0), (0, 1), (1,)),  # an axis outside the group cuts, too
        ],
    )
    def test_a_pack_is_the_list_of_pieces(self, source, target, axes) -> None:
        self._check_grids(all_to_all(source, target, (12, 6), axes))

    def test_a_pack_where_the_inner_axis_cuts_first(self) -> None:
        step = all_to_all((0, 0), (1, 1), (12, 6))
        self._check_grids(dataclasses.replace(step, before=step.before._replace(orders=((1, 0), ()))))

    def _check_grids(self, step) -> None:
        whole = torch.arange(72).reshape(12, 6)
        for place in itertools.product(*map(range, SIZES)):
            held, wanted = step.before.box(place), step.after.box(place)
            pack, unpack = grids(step, held, wanted)
            local = cut(whole, held).reshape(pack.lengths).expand(pack.expanded)
            packed = local.permute(pack.order).reshape(-1)
            sent = list(step.sends(place))
            self.assertEqual([piece.member for piece in sent], [*range(step.ranks)])
            pieces = [cut(cut(whole, held), piece.box).reshape(-1) for piece in sent]
            self.assertEqual(packed, torch.cat(pieces), msg=f"{place}")
            came = [cut(cut(whole, wanted), piece.box).reshape(-1) for piece in step.receives(place)]
            flat = torch.cat(came).reshape(unpack.lengths).permute(unpack.order)
            self.assertEqual(flat.reshape(wanted.length), cut(whole, wanted))

    @parametrize("cuts", [(0, 0), (0, 1), (1, 0), (1, 1)])
    def test_a_gather_and_a_scatter_have_the_list_of_pieces(self, cuts) -> None:
        whole = torch.arange(72).reshape(12, 6)
        shards, pending = (
            Regions.of(*dims_and_ops, (12, 6), SIZES)
            for dims_and_ops in ((cuts, (None,) * 2), ((None,) * 2, ("sum",) * 2))
        )
        gather = AllGather(shards, Regions.of((None,) * 2, (None,) * 2, (12, 6), SIZES), (0, 1))
        scatter = ReduceScatter(pending, shards, (0, 1), "sum")
        for place in itertools.product(*map(range, SIZES)):
            shard, all_of_it = shards.box(place), pending.box(place)
            pack, unpack = grids(gather, shard, all_of_it)
            self.assertIsNone(pack)
            flat = torch.cat([cut(whole, piece.box).reshape(-1) for piece in gather.pieces(place)])
            self.assertEqual(flat.reshape(unpack.lengths).permute(unpack.order).reshape(12, 6), whole)
            pack, unpack = grids(scatter, all_of_it, shard)
            self.assertIsNone(unpack)
            packed = whole.reshape(pack.lengths).permute(pack.order).reshape(-1)
            pieces = [cut(whole, piece.box).reshape(-1) for piece in scatter.pieces(place)]
            self.assertEqual(packed, torch.cat(pieces), msg=f"{place}")

    def test_other_steps_have_none(self) -> None:
        uneven, crossed = all_to_all((0, 0), (1, 1), (7, 4)), all_to_all((0, 1), (1, 0), (12, 6))
        reducing = dataclasses.replace(all_to_all((0, 0), (1, 1), (12, 6)), op="sum")
        regrouped = all_to_all((0, None), (1, 1), (12, 6), axes=(0,))  # equal pieces; the other axis cuts, too
        for step in (uneven, crossed, reducing, regrouped):
            self._check_has_none(step, (0, 0))

    def test_a_gather_that_pads_has_none(self) -> None:
        """The last three of seven rows, one from each member, where others send two."""
        sixths, halves = (Regions.of(dims, (None,) * 2, (7,), SIZES) for dims in ((0, 0), (0, None)))
        self._check_has_none(AllGather(sixths, halves, (1,)), (1, 0))

    def test_a_scatter_that_pads_or_that_a_free_axis_cuts_too_has_none(self) -> None:
        """Seven rows for two; and six of twelve rows for each of two, of which a rank has one third."""
        for length, axes in ((7, (None, None)), (12, (None, 0))):
            pending = Regions.of((None,) * 2, ("sum", None), (length,), SIZES)
            shards = Regions.of((0, axes[1]), (None,) * 2, (length,), SIZES)
            self._check_has_none(ReduceScatter(pending, shards, (0,), "sum"), (0, 0))

    def test_where_some_members_exchange_nothing_there_is_none(self) -> None:
        """Those that differ along an axis whose cut stays, and along one that doesn't cut the source."""
        self._check_has_none(all_to_all((0, 1), (0, None), (12, 6)), (0, 0))
        self._check_has_none(all_to_all((None, 0), (1, None), (12, 6)), (0, 0))

    def _check_has_none(self, step, place) -> None:
        self.assertEqual(grids(step, step.before.box(place), step.after.box(place)), (None, None), msg=f"{step}")


instantiate_parametrized_tests(TestGrids)
if __name__ == "__main__":
    run_tests()
