# Owner(s): ["oncall: distributed"]
"""What is asked, over which groups, and all-to-alls."""

import copy
import functools
import itertools
import operator
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import aot_function, default_partition, min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh.universe import private_groups
from torch_overlay.distributed.tensor._planner.grids import Grid
from torch_overlay.distributed.tensor._planner.regions import OPS, NotPlanned, ReduceOp, Regions
from torch_overlay.distributed.tensor._planner.search import plan
from torch_overlay.distributed.tensor._planner.steps import AllToAll
from torch_overlay.distributed.tensor._runner import exchange as packs
from torch_overlay.distributed.tensor._runner.at_hand import Group, Site, at_hand
from torch_overlay.distributed.tensor._runner.exchange import (
    Apart,
    Here,
    all_to_all,
    all_to_all_by_size,
    all_to_all_in_rounds,
    assembled,
    joined,
    landing,
    part,
    unpacking,
    unpacking_in_place,
)
from torch_overlay.distributed.tensor._runner.question import Question, why_not


class FakeWorld(TestCase):
    """In a world of which this process plays one rank, with some settings; no bytes move."""

    rank, ranks = 0, 4
    settings: ClassVar[dict[str, object]] = {}

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.ranks)
        self.addCleanup(dist.destroy_process_group)
        patched = config.patch(**self.settings)
        patched.__enter__()
        self.addCleanup(patched.__exit__, None, None, None)


class TestSite(FakeWorld):
    """On a 2 x 4 mesh, as rank 7 of 8 sees it."""

    rank, ranks = 7, 8

    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

    def test_a_copy_has_the_same(self) -> None:
        site = Site.of(self.mesh)
        self.assertEqual((site.names, site.coordinate), (("dp", "tp"), (1, 3)))
        self.assertEqual(site.groups, tuple(group.group_name for group in self.mesh.get_all_groups()))
        self.assertEqual({site, Site.of(copy.copy(self.mesh))}, {site})

    def test_what_a_plan_depends_on_makes_another(self) -> None:
        with config.patch(mesh_share_groups="names", mesh_joint_groups="existing"):
            site = Site.of(self.mesh)
            self.assertNotEqual(site, Site.of(self.mesh["tp"]))
            self.mesh._flatten("all")
            flattened = Site.of(self.mesh)
        self.assertNotEqual(site, flattened)
        with config.patch(mesh_share_groups="names", mesh_joint_groups="whole"):
            self.assertNotEqual(flattened, Site.of(self.mesh))

    def test_a_slice_of_a_private_view_is_another_site(self) -> None:
        """It has the groups of the same slice of the root mesh, but none over several of its axes."""
        with config.patch(mesh_share_groups="names", mesh_joint_groups="whole"):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
            with private_groups():
                apart = mesh._unflatten(0, (2, 1), ("x", "y"))
            self.assertEqual(Site.of(apart["b", "c"]).groups, Site.of(mesh["b", "c"]).groups)
            self.assertNotEqual(Site.of(apart["b", "c"]), Site.of(mesh["b", "c"]))


class TestGroupsAtHand(FakeWorld):
    """On a 2 x 2 x 2 mesh, as rank 5 of 8 sees it."""

    rank, ranks = 5, 8

    def _mesh(self, joint: str) -> DeviceMesh:
        with config.patch(mesh_share_groups="names", mesh_joint_groups=joint):
            return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))

    @parametrize("joint, axes", [("existing", []), ("whole", [(0, 1, 2)])])
    def test_what_a_mesh_brings(self, joint, axes) -> None:
        mesh = self._mesh(joint)
        with config.patch(mesh_share_groups="names", mesh_joint_groups=joint):
            self.assertEqual(sorted(at_hand(mesh, Site.of(mesh)).joint), sorted(axes))
            for together in axes:
                ranks = mesh[tuple("abc"[axis] for axis in together)].mesh.flatten().tolist()
                name = at_hand(mesh, Site.of(mesh)).find(mesh, together).name
                self.assertEqual(
                    dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)), ranks
                )

    def test_a_flattened_view_serves_and_only_its_dims(self) -> None:
        with config.patch(mesh_share_groups="names", mesh_joint_groups="existing"):
            mesh = self._mesh("existing")
            flat = mesh["b", "c"]._flatten("bc")
            known = at_hand(mesh, Site.of(mesh))
            self.assertEqual(known.joint, {(1, 2)})
            group = known.find(mesh, (1, 2))
            self.assertEqual((group.name, group.places), (flat.get_group().group_name, (0, 1, 2, 3)))

    def test_a_group_may_have_its_own_order_but_no_other_ranks(self) -> None:
        ranks = [[3, 2, 1, 0], [7, 6, 5, 4]]
        groups = [dist.new_group([1, 5]), dist.new_group([4, 5, 6, 7])]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("a", "b"))
        known = at_hand(mesh, Site.of(mesh))
        self.assertEqual(known.find(mesh, (0,)), Group(groups[0].group_name, (0, 1), in_order=True))
        self.assertEqual(known.find(mesh, (1,)), Group(groups[1].group_name, (3, 2, 1, 0), in_order=False))
        swapped = DeviceMesh.from_group(groups[::-1], "cpu", mesh=ranks, mesh_dim_names=("a", "b"))
        with self.assertRaisesRegex(NotPlanned, r"holds \[4, 5, 6, 7\], not \[1, 5\]"):
            at_hand(swapped, Site.of(swapped)).find(swapped, (0,))

    def test_what_was_found_is_remembered_until_the_group_is_gone(self) -> None:
        mesh = init_device_mesh("cpu", (2, 4))
        known = at_hand(mesh, Site.of(mesh))
        group = known.find(mesh, (1,))
        self.assertIs(at_hand(mesh, Site.of(mesh)), known)
        self.assertIs(known.find(mesh, (1,)), group)
        dist.destroy_process_group(mesh.get_group(1))
        with self.assertRaisesRegex(RuntimeError, "the process group over dim_1 .* is gone"):
            known.find(mesh, (1,))


instantiate_parametrized_tests(TestGroupsAtHand)


class Other(Partial):
    """Equal to Partial(), and perhaps something else."""


class TestQuestion(FakeWorld):
    def setUp(self) -> None:
        super().setUp()
        self.mesh = init_device_mesh("cpu", (4,))

    def _question(self, source, shape=(8, 8), dtype=torch.float32, async_op=False) -> Question:
        specs = (DTensorSpec(self.mesh, (end,)) for end in (source, Replicate()))
        return Question.of(self.mesh, *specs, shape, dtype, async_op)

    def test_what_differs_is_another_question(self) -> None:
        asked = self._question(Partial())
        again = self._question(Partial())
        self.assertEqual((asked, hash(asked), asked.sizes), (again, hash(again), (4,)))
        others = (
            self._question(Shard(0)),
            self._question(Other()),
            self._question(Partial(), shape=(8, 4)),
            self._question(Partial(), dtype=torch.float64),
            self._question(Partial(), async_op=True),
        )
        self.assertNotIn(asked, others)

    def test_why_none_is_asked(self) -> None:
        meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
        source, target = (DTensorSpec(self.mesh, (end,), tensor_meta=meta) for end in (Shard(0), Replicate()))
        other = DTensorSpec(init_device_mesh("cpu", (2,)), (Replicate(),))
        with config.patch(plan_redistribution=True):
            self.assertIsNone(why_not(self.mesh, source, target))
            for forced in (True, False):
                asked = "an algorithm for the steps was asked for"
                self.assertEqual(why_not(self.mesh, source, target, forced), asked)
                with mock.patch.object(_redistribute, "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", forced):
                    self.assertEqual(why_not(self.mesh, source, target), asked)
            self.assertEqual(why_not(self.mesh, source, other), "another mesh")


class TestPack(TestCase):
    def test_boxes_come_back_from_one_buffer(self) -> None:
        whole = torch.arange(35).reshape(5, 7)
        for dims in itertools.product((None, 0, 1), repeat=2):
            regions = Regions.of(dims, (None, None), (5, 7), (2, 3))
            boxes = {regions.box(place) for place in itertools.product(range(2), range(3))}
            boxes = sorted(box for box in boxes if box.elements)
            flat = joined([part(whole, box) for box in boxes])
            starts = itertools.accumulate([box.elements for box in boxes], initial=0)
            self.assertEqual(assembled(flat, [*zip(starts, boxes)], (5, 7)), whole, msg=f"{dims}")

    def test_nothing_comes_from_what_arrived(self) -> None:
        """A compiler keeps a collective only if something depends on it."""
        arrived = torch.zeros(0, requires_grad=True)
        self.assertTrue(assembled(arrived, [], (0, 3)).requires_grad)


REDUCED = {
    "sum": lambda terms: torch.stack(terms).sum(0),
    "max": lambda terms: torch.stack(terms).amax(0),
    "min": lambda terms: torch.stack(terms).amin(0),
    "product": lambda terms: torch.stack(terms).prod(0),
    "band": functools.partial(functools.reduce, operator.and_),
    "bor": functools.partial(functools.reduce, operator.or_),
    "bxor": functools.partial(functools.reduce, operator.xor),
}


class TestExchange(DTensorOpTestBase):
    """Four threads play the ranks."""

    @property
    def world_size(self) -> int:
        return 4

    def _here(self, step) -> Here:
        place = (self.rank,)
        return Here(place, step.before.box(place), step.after.box(place))

    def _group(self) -> Group:
        return Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)

    def _exchanged(self, step, local) -> torch.Tensor:
        pack, exchange, land = all_to_all(step, self._here(step), self._group(), torch.ops._c10d_functional.wait_tensor)
        return land(exchange(pack(local)))

    def test_rows_to_columns(self) -> None:
        for shape in ((8, 8), (5, 7), (1, 3), (9, 2)):
            for dtype in (torch.float32, torch.int16):  # whole, and as bytes
                whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
                step = AllToAll(*(Regions.of((dim,), (None,), shape, (4,)) for dim in (0, 1)), (0,))
                here = self._here(step)
                moved = self._exchanged(step, part(whole, here.held))
                self.assertEqual(moved, part(whole, here.wanted), msg=f"{shape} on rank {self.rank}")

    def test_each_reduction_is_done(self) -> None:
        for shape, op in itertools.product(((8, 8), (5, 7), (1, 3)), REDUCED):
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            pending, rows = Regions.of((None,), ("sum",), shape, (4,)), Regions.of((0,), (None,), shape, (4,))
            step, terms = AllToAll(pending, rows, (0,), op, (0,)), [whole * (rank + 1) for rank in range(4)]
            moved = self._exchanged(step, terms[self.rank])
            self.assertEqual(moved, part(REDUCED[op](terms), self._here(step).wanted), msg=f"{op} of {shape}")


class TestOwnPart(TestExchange):
    """Every message counts as large."""

    @classmethod
    def setUpClass(cls) -> None:  # once, since a thread that ended would take it from the others
        super().setUpClass()
        large = mock.patch.object(packs, "LARGE_BYTES", {"cpu": 0})
        large.start()
        cls.addClassCleanup(large.stop)

    def _exchanged(self, step, local) -> torch.Tensor:
        wait = torch.ops._c10d_functional.wait_tensor
        pack, exchange, land = all_to_all_by_size(step, self._here(step), self._group(), wait)
        packed = pack(local)
        if step.before.shape == (8, 8):  # else some ranks have nothing for others
            self.assertIsInstance(packed, Apart)
        return land(exchange(packed))


class TestRoundsRun(TestExchange):
    def _exchanged(self, step, local) -> torch.Tensor:
        for rounds in (1, 2, 4):
            with CommDebugMode() as counted:
                done = all_to_all_in_rounds(replace(step, rounds=rounds), self._here(step), self._group())(local)
            self.assertEqual(counted.get_total_counts(), rounds, msg="ranks that have nothing take part, too")
        return done


class TestNothingToSend(FakeWorld):
    rank = 3

    def test_a_rank_that_only_receives(self) -> None:
        rows, columns = (Regions.of((dim,), (None,), (1, 4), (4,)) for dim in (0, 1))
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        here = Here((3,), rows.box((3,)), columns.box((3,)))
        step = AllToAll(rows, columns, (0,))
        pack, exchange, land = all_to_all(step, here, group, torch.ops._c10d_functional.wait_tensor)
        try:
            self.assertEqual(land(exchange(pack(torch.ones(0, 4)))).shape, (1, 1))
        except RuntimeError as error:
            if "inputBuffer is empty" not in str(error):
                raise
            self.skipTest("this release's fake group sends no empty buffer")


class TestAlike(TestCase):
    """No process group."""

    def test_a_group_in_another_order_goes_by_pieces(self) -> None:
        whole = torch.arange(64).reshape(8, 8)
        rows, columns = (Regions.of((dim,), (None,), (8, 8), (4,)) for dim in (0, 1))
        here = Here((1,), rows.box((1,)), columns.box((1,)))
        group = Group("", (3, 2, 1, 0), in_order=False)
        pack, _, land = all_to_all(AllToAll(rows, columns, (0,)), here, group, torch.Tensor.clone)
        sent = torch.cat([columns_of.flatten() for columns_of in reversed(part(whole, here.held).split(2, dim=1))])
        self.assertEqual(pack(part(whole, here.held)), sent)
        came = torch.cat([rows_of.flatten() for rows_of in reversed(part(whole, here.wanted).split(2))])
        self.assertEqual(land(came), part(whole, here.wanted))


class TestInPlace(TestCase):
    def test_what_autograd_follows_stays(self) -> None:
        asks = torch.ones(4, requires_grad=True)
        with mock.patch.object(packs, "LARGE_BYTES", {"cpu": 0}):
            self.assertFalse(packs.is_large(asks, 4))
            with torch.no_grad():
                self.assertTrue(packs.is_large(asks, 4))

    @parametrize("members", [3, 4])  # with 4 a sorted block has the shape of the block
    @parametrize("large", [packs.LARGE_BYTES["cpu"], 900, 480, 0])
    def test_large_blocks_are_sorted_where_they_are(self, large, members) -> None:
        """There are two blocks of 480 bytes or 640; where only both together are large, they are copied at once."""
        lengths = (2, members, 4, 5)
        grid = Grid(lengths, lengths, (0, 2, 1, 3))
        flat, shape = torch.arange(40 * members), (8, 5 * members)
        expected = unpacking(grid, shape)(flat)
        with mock.patch.object(packs, "LARGE_BYTES", {"cpu": large}):
            came = unpacking_in_place(grid, shape)(flat)
        self.assertEqual(came, expected)
        self.assertEqual(came.data_ptr() == flat.data_ptr(), large <= 480)


instantiate_parametrized_tests(TestInPlace)


class TestReducing(TestCase):
    """Without communication: what arrives is made up."""

    def test_nothing_comes_from_what_arrived(self) -> None:
        """A compiler keeps a collective only if something depends on it."""
        pending, rows = Regions.of((None,), ("sum",), (1, 3), (4,)), Regions.of((0,), (None,), (1, 3), (4,))
        group = Group("", (0, 1, 2, 3), in_order=True)
        land = landing(AllToAll(pending, rows, (0,), "sum", (0,)), (), [0] * 4, group, (0, 3))
        self.assertTrue(land(torch.zeros(0, requires_grad=True)).requires_grad)

    @parametrize("op", ["sum", "max", "product"])
    @parametrize("grad", [False, True])
    def test_all_terms_at_once_are_what_they_are_piece_by_piece(self, op, grad) -> None:
        """To the bit: in the same order."""
        sizes, shape, members = (2, 3, 2), (6, 12), tuple(range(12))
        before = Regions.of((None, 0, None), (op, None, op), shape, sizes)
        after = Regions.of((1, None, 1), (None, None, None), shape, sizes)
        step, coordinate = AllToAll(before, after, (0, 1, 2), op, (0, 2)), (1, 2, 0)
        here = Here(coordinate, before.box(coordinate), after.box(coordinate))
        flat = torch.randn(12 * 6, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)
        lands = []
        for in_order in (True, False):
            _, _, land = all_to_all(step, here, Group("", members, in_order=in_order), lambda tensor: tensor)
            lands.append(land(flat.clone()))
        by_grid, by_pieces = lands
        self.assertEqual(by_grid, by_pieces, rtol=0, atol=0)
        self.assertEqual((by_grid.is_contiguous(), by_grid.requires_grad), (True, grad))

    def test_an_all_to_all_reduces_by_any_row_of_the_table(self) -> None:
        """From the spec to the reduction of the terms, nothing else has to know an operation."""
        shape, sizes, coordinate = (16, 16), (2, 2, 2), (0, 1, 1)
        with mock.patch.dict(OPS, {"hypot": ReduceOp("hypot")}):
            before = Regions.of((None, 0, None), (None, None, "hypot"), shape, sizes)
            after = Regions.of((None, 1, 1), (None, None, None), shape, sizes)
            (step,) = plan(before, after, itemsize=4)
            here = Here(coordinate, before.box(coordinate), after.box(coordinate))
            _, _, land = all_to_all(step, here, Group("", (0, 1, 2, 3), in_order=True), lambda tensor: tensor)
            terms = [torch.full(shape, float(value)) for value in (3, 4)]  # by the coordinate on axis 2
            pieces = sorted(step.receives(coordinate))
            came = [part(part(terms[piece.member % 2], here.wanted), piece.box).flatten() for piece in pieces]
            self.assertEqual(land(torch.cat(came)), torch.full(here.wanted.length, 5.0))


instantiate_parametrized_tests(TestReducing)


class Exchanged(torch.autograd.Function):
    """An exchange as a compiler sees it, which makes a graph for each direction."""

    @staticmethod
    def forward(ctx, local, exchange):
        ctx.shape = local.shape
        return exchange(local)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.shape), None


def forward_calls(exchange, partition) -> list[str]:
    """What the forward graph of training calls, where this rank's tensor has no elements."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = aot_function(lambda local: Exchanged.apply(local, exchange), keep, partition_fn=partition)
    compiled(torch.ones(0, 3, requires_grad=True))
    return [str(node.target) for node in graphs[0].graph.nodes]


class TestRoundsCompiled(FakeWorld):
    rank = 3

    def test_a_rank_that_has_nothing_takes_part_in_each_round(self) -> None:
        """Nobody reads what arrives there, and the others would wait for this rank."""
        group = Group(init_device_mesh("cpu", (4,)).get_group().group_name, (0, 1, 2, 3), in_order=True)
        rows, columns = (Regions.of((dim,), (None,), (1, 3), (4,)) for dim in (0, 1))
        here = Here((3,), rows.box((3,)), columns.box((3,)))
        exchange = all_to_all_in_rounds(AllToAll(rows, columns, (0,), rounds=2), here, group)
        for partition in (default_partition, min_cut_rematerialization_partition):
            called = forward_calls(exchange, partition)
            self.assertEqual(sum("all_to_all_single" in name for name in called), 2, msg=f"{partition.__name__}")


if __name__ == "__main__":
    run_tests()
