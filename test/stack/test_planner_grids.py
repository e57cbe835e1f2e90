# Owner(s): ["oncall: distributed"]
"""A grid packs the pieces of a step as its list of pieces does, and puts them in their places."""

import itertools

import torch
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

from torch_overlay.distributed.tensor._planner.grids import grids
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllGather, AllToAll, ReduceScatter

SIZES = (2, 2)


def cut(tensor, box):
    """A view of a box; a piece's box counts from the start of what holds it."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def ends(source, target, shape) -> AllToAll:
    before, after = (Regions.of(dims, (None, None), shape, SIZES) for dims in (source, target))
    return AllToAll(before, after, (0, 1))


class TestGrids(TestCase):
    @parametrize("source, target", [((0, 0), (1, 1)), ((0, 0), (None, 1)), ((0, 0), (1, None))])
    def test_a_pack_is_the_list_of_pieces(self, source, target) -> None:
        step, whole = ends(source, target, (8, 4)), torch.arange(32).reshape(8, 4)
        for place in itertools.product(range(2), repeat=2):
            held = step.before.box(place)
            pack, unpack = grids(step, held, step.after.box(place))
            local = cut(whole, held).reshape(pack.lengths).expand(pack.times)
            packed = local.permute(pack.order).reshape(-1)
            pieces = [cut(cut(whole, held), piece.box).reshape(-1) for piece in step.sends(place)]
            self.assertEqual(packed, torch.cat(pieces), msg=f"{place}")
            came = [cut(cut(whole, step.after.box(place)), piece.box).reshape(-1) for piece in step.receives(place)]
            flat = torch.cat(came).reshape(unpack.lengths).permute(unpack.order)
            self.assertEqual(flat.reshape(step.after.box(place).length), cut(whole, step.after.box(place)))

    @parametrize("cuts", [(0, 0), (0, 1), (1, 0), (1, 1)])
    def test_a_gather_and_a_scatter_have_the_list_of_pieces(self, cuts) -> None:
        whole = torch.arange(32).reshape(8, 4)
        shards, pending = (
            Regions.of(*dims_and_ops, (8, 4), SIZES)
            for dims_and_ops in ((cuts, (None,) * 2), ((None,) * 2, ("sum",) * 2))
        )
        gather = AllGather(shards, Regions.of((None,) * 2, (None,) * 2, (8, 4), SIZES), (0, 1))
        scatter = ReduceScatter(pending, shards, (0, 1), "sum")
        for place in itertools.product(range(2), repeat=2):
            shard, all_of_it = shards.box(place), pending.box(place)
            _, unpack = grids(gather, shard, all_of_it)
            flat = torch.cat([cut(whole, piece.box).reshape(-1) for piece in gather.pieces(place)])
            self.assertEqual(flat.reshape(unpack.lengths).permute(unpack.order).reshape(8, 4), whole)
            pack, _ = grids(scatter, all_of_it, shard)
            packed = whole.reshape(pack.lengths).expand(pack.times).permute(pack.order).reshape(-1)
            pieces = [cut(whole, piece.box).reshape(-1) for piece in scatter.pieces(place)]
            self.assertEqual(packed, torch.cat(pieces), msg=f"{place}")

    def test_pieces_that_differ_have_none(self) -> None:
        for source, target, shape in (((0, 0), (1, 1), (7, 4)), ((0, 1), (1, 0), (8, 4))):
            step = ends(source, target, shape)
            self.assertEqual(grids(step, step.before.box((0, 0)), step.after.box((0, 0))), (None, None))


instantiate_parametrized_tests(TestGrids)
if __name__ == "__main__":
    run_tests()
