# Owner(s): ["oncall: distributed"]
"""Steps as collectives."""

import contextlib
import itertools

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, _dtensor_spec
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.distributed.tensor._planner.regions import NotPlanned, Regions
from torch_overlay.distributed.tensor._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
)
from torch_overlay.distributed.tensor._runner.at_hand import Group
from torch_overlay.distributed.tensor._runner.exchange import assembled, part
from torch_overlay.distributed.tensor._runner.program import runners
from torch_overlay.distributed.tensor._runner.specs import gathered, norm_ended, norm_made, read_cuts, scattered


class TestSpecs(TestCase):
    """What DTensor says, as the planner reads it; no process group."""

    def test_placements_are_the_boxes_that_they_say(self) -> None:
        read = {Replicate(): (None, None), Shard(0): (0, None), Shard(1): (1, None), Partial("max"): (None, "max")}
        for placements in itertools.product(read, repeat=2):
            dims, ops = zip(*(read[placement] for placement in placements))
            cuts = read_cuts(placements, None, 2, (2, 3)).on((5, 7), (2, 3))
            self.assertEqual(cuts, Regions.of(dims, ops, (5, 7), (2, 3)), msg=f"{placements}")

    def test_strided_shards_are_an_order_of_mesh_dims(self) -> None:
        """Two ranks cut four parts each, and the outer mesh dim takes them strided."""
        strided = read_cuts((_StridedShard(0, split_factor=2), Shard(0)), None, 1, (2, 2))
        ordered = [_dtensor_spec.ShardOrderEntry(0, (1, 0))]
        self.assertEqual(strided, read_cuts((Shard(0), Shard(0)), ordered, 1, (2, 2)))
        self.assertEqual([strided.on((8,), (2, 2)).box(place).start for place in ((0, 1), (1, 0))], [(4,), (2,)])
        with self.assertRaises(NotPlanned):
            strided.on((7,), (2, 2))

    def test_strided_shards_have_no_order_beside_their_factors(self) -> None:
        ordered = [_dtensor_spec.ShardOrderEntry(0, (1, 0))]
        with self.assertRaisesRegex(NotPlanned, "a shard order of their own"):
            read_cuts((_StridedShard(0, split_factor=2), Shard(0)), ordered, 1, (2, 2))

    def test_a_subclass_may_mean_anything(self) -> None:
        class Other(Partial):
            pass

        with self.assertRaisesRegex(NotPlanned, "a placement of the class Other"):
            read_cuts((Other("sum"),), None, 1, (2,))


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

    def test_only_replicas_become_terms(self) -> None:
        norm = _NormPartial(2)
        for source, target in (
            ((Shard(0),), (norm,)),
            ((Partial(),), (norm,)),
            ((norm,), (Partial(),)),
            ((norm,), (_NormPartial(norm_type=3),)),
            ((norm, norm), (Replicate(), Partial())),
            ((norm, Replicate()), (Replicate(), Partial())),
            ((norm, Replicate()), (Replicate(), norm)),
            ((norm, Replicate()), (norm, _NormPartial(norm_type=3))),
        ):
            with self.assertRaisesRegex(NotPlanned, "from something else"):
                norm_ended(source, target, (2,) * len(source))
        for source, target in (
            ((Replicate(),), (norm,)),
            ((norm, Replicate(), Shard(0)), (norm, norm, Shard(1))),
        ):
            self.assertIsNone(norm_ended(source, target, (2,) * len(source)))
            self.assertEqual(norm_made(source, target), norm)


class TestRun(DTensorOpTestBase):
    """Four threads play the ranks of a line, or of a 2 x 2 mesh where a step is over two mesh dims."""

    @property
    def world_size(self) -> int:
        return 4

    watched = contextlib.nullcontext  # around what runs

    def _regions(self, dim, shape, op=None) -> Regions:
        return Regions.of((dim,), (op,), shape, (4,))

    def _moved(self, steps, local, async_op=False, in_order=True) -> torch.Tensor:
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order)
        place = (self.rank,) if len(steps[0].before.sizes) == 1 else divmod(self.rank, 2)
        functions = runners(steps, place, steps[0].before.box(place), lambda axes: group, async_op)
        with self.watched():
            for function in functions:
                local = function(local)
        return local

    def test_moves(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3)):
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            replicas, rows, columns = (self._regions(dim, shape) for dim in (None, 0, 1))
            for steps in (
                [Narrow(replicas, rows)],
                [AllToAll(rows, columns, (0,))],
                [AllToAll(rows, columns, (0,), rounds=2)],
                [Narrow(replicas, columns), AllToAll(columns, rows, (0,))],
                [AllGather(rows, replicas, (0,))],
                [AllGather(columns, replicas, (0,))],
                [AllToAll(rows, columns, (0,)), AllGather(columns, replicas, (0,)), Narrow(replicas, rows)],
            ):
                held, wanted = steps[0].before.box((self.rank,)), steps[-1].after.box((self.rank,))
                for in_order in (True, False):  # by operations that compilers know, or box by box
                    moved = self._moved(steps, part(whole, held), in_order=in_order)
                    self.assertEqual(moved, part(whole, wanted), msg=f"{shape}: {steps}, {in_order}")

    def test_two_dims(self) -> None:
        """By one permute where the boxes are alike, else each padded to the largest."""
        for shape in ((8, 8), (5, 7), (1, 3)):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            blocks, replicas = (Regions.of(dims, (None, None), shape, (2, 2)) for dims in ((0, 1), (None, None)))
            mine = part(whole, blocks.box(divmod(self.rank, 2)))
            self.assertEqual(self._moved([AllGather(blocks, replicas, (0, 1))], mine), whole, msg=f"{shape}")
            pending = Regions.of((None, None), ("sum", "sum"), shape, (2, 2))
            self.assertEqual(self._moved([ReduceScatter(pending, blocks, (0, 1), "sum")], whole), mine * 4)

    def test_reductions(self) -> None:
        for shape in ((8, 8), (5, 7)):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            pending, replicas, rows = (self._regions(*end) for end in ((None, shape, "sum"), (None, shape), (0, shape)))
            mine = part(whole, rows.box((self.rank,)))
            summed = self._moved([AllReduce(pending, replicas, (0,), "sum"), Divide(4)], whole)
            self.assertEqual(summed, whole)
            terms = [Embed(rows, pending), AllReduce(pending, replicas, (0,), "sum")]
            self.assertEqual(self._moved(terms, mine), whole)
            self.assertEqual(self._moved([ReduceScatter(pending, rows, (0,), "sum")], whole), mine * 4)

    def test_in_rounds(self) -> None:
        whole, pending = torch.arange(64.0).reshape(8, 8), self._regions(None, (8, 8), "sum")
        for dim in (0, 1):
            parts = self._regions(dim, (8, 8))
            with CommDebugMode() as counted:
                summed = self._moved([ReduceScatter(pending, parts, (0,), "sum", 2)], whole * (self.rank + 1))
            self.assertEqual(summed, part(whole * 10, parts.box((self.rank,))), msg=f"{dim} on rank {self.rank}")
            self.assertEqual(counted.get_total_counts(), 2)

    def test_nothing_is_written_in_place_under_a_dispatch_mode(self) -> None:
        """Selective activation checkpointing refuses what it kept and what was written then."""
        written = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func._schema.is_mutable and func.namespace == "aten":
                    written.append(func)
                return func(*args, **(kwargs or {}))

        self.watched = Watch
        self.test_moves()
        self.test_two_dims()
        self.test_reductions()
        self.test_in_rounds()
        self.assertEqual(written, [])

    def test_types_that_some_backends_do_not_move_travel_as_bytes(self) -> None:
        sent = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
                    sent.append(args[0].dtype)
                return func(*args, **(kwargs or {}))

        rows, replicas = self._regions(0, (8, 8)), self._regions(None, (8, 8))
        for dtype in (torch.int32, torch.int16):
            whole = torch.arange(64).reshape(8, 8).to(dtype)
            with Watch():
                moved = self._moved([AllGather(rows, replicas, (0,))], part(whole, rows.box((self.rank,))))
            self.assertEqual(moved, whole)
        self.assertEqual(sent, [torch.int32, torch.uint8])

    def test_the_last_collective_is_waited_for_later(self) -> None:
        """Of a later dim, too, behind dims of one: joining the sequence of a batch of one is a view."""
        for dim, shape in ((0, (8, 8)), (1, (1, 8, 3))):
            shards, replicas = self._regions(dim, shape), self._regions(None, shape)
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            local = part(whole, shards.box((self.rank,)))
            gathered = self._moved([AllGather(shards, replicas, (0,))], local, async_op=True)
            self.assertIsInstance(gathered, AsyncCollectiveTensor)
            self.assertEqual(gathered + 0, whole)


class TestPadding(TestCase):
    def test_padding_stays_where_it_is_little(self) -> None:
        """A view keeps in memory what it is a view of."""
        pieces = [(0, Box((0, 0), (5, 7)))]
        for padding, is_view in ((5, True), (40, False)):
            flat = torch.arange(35 + padding)
            whole = assembled(flat, pieces, (5, 7))
            self.assertEqual(whole, flat[:35].view(5, 7))
            self.assertEqual(whole.data_ptr() == flat.data_ptr(), is_view)


class TestSpelling(TestCase):
    """A gather along dim 0 of what three ranks send is what the collective does; no process group."""

    @parametrize("dim", [0, 1])
    @parametrize("length", [6, 7, 2])
    def test_a_gather_puts_shards_together(self, dim, length) -> None:
        shape = (length, 4) if dim == 0 else (4, length)
        whole = torch.arange(4 * length).reshape(shape)
        before, after = (Regions.of((d,), (None,), shape, (3,)) for d in (dim, None))
        step, boxes = AllGather(before, after, (0,)), [before.box((rank,)) for rank in range(3)]
        spellings = [gathered(step, box, after.box((0,))) for box in boxes]
        arrived = torch.cat([pack(part(whole, box)) for (pack, _), box in zip(spellings, boxes)])
        for _, land in spellings:
            self.assertEqual(land(arrived) if land else arrived, whole)


instantiate_parametrized_tests(TestSpelling)


class TestScatterSpelling(TestCase):
    """What goes into a reduce-scatter; no process group."""

    @parametrize("dim", [0, 1])
    def test_a_scatter_leaves_parts_in_a_row(self, dim) -> None:
        whole = torch.arange(36).reshape(6, 6)
        before, after = Regions.of((None,), ("sum",), (6, 6), (3,)), Regions.of((dim,), (None,), (6, 6), (3,))
        step = ReduceScatter(before, after, (0,), "sum")
        for rank in range(3):
            pack = scattered(step, before.box((0,)), after.box((rank,)))
            self.assertEqual(pack(whole).chunk(3)[rank], part(whole, after.box((rank,))))

    def test_uneven_parts_have_no_spelling(self) -> None:
        before, after = Regions.of((None,), ("sum",), (7, 6), (3,)), Regions.of((0,), (None,), (7, 6), (3,))
        step = ReduceScatter(before, after, (0,), "sum")
        self.assertIsNone(scattered(step, before.box((0,)), after.box((0,))))


instantiate_parametrized_tests(TestScatterSpelling)


if __name__ == "__main__":
    run_tests()
