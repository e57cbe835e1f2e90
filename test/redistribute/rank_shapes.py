"""Shapes, types, reductions and rank orders, each by real collectives against the whole tensor cut by hand."""

import itertools
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mesh_harness import needs_overlay
from mesh_ranks import SHUFFLED
from on_device import DEVICE
from twins_ranks import Case, MeshRecipe, placed
from way import needs_package
from width import sample

RANKS = tuple(range(8))
CUBE = MeshRecipe(RANKS, (2, 2, 2), flattened=("ab", "bc", "abc"))
GRID = MeshRecipe(RANKS, (2, 4), flattened=("ab",))
MOVES = (
    ((("S", 0), ("S", 0)), (("R",), ("R",))),
    ((("S", 0), ("S", 1)), (("S", 1), ("S", 0))),
    ((("R",), ("S", 0)), (("S", 0), ("R",))),
    ((("S", 1), ("R",)), (("S", 0), ("S", 0))),
)
REDUCTIONS = (
    ((("P", "sum"), ("P", "sum")), (("R",), ("R",))),
    ((("P", "sum"), ("P", "sum")), (("S", 0), ("S", 1))),
    ((("P", "sum"), ("S", 0)), (("S", 0), ("R",))),
    ((("S", 1), ("P", "sum")), (("R",), ("P", "sum"))),
)
TYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool")
# What gloo doesn't move by itself; our moves take these as bytes.
AS_BYTES = ("int16", "complex64", "float8_e4m3fn", "float8_e5m2")


class ShapeCases:
    """Cases for ``EightRanks``."""

    def check(self, *cases: Case) -> None:
        """Run them in turn, each on the mesh that it names."""
        meshes = {}
        for case in cases:
            if case.mesh not in meshes:
                meshes[case.mesh] = case.mesh.make()
            problem = case.problem(meshes[case.mesh], self.rank)
            self.assertIsNone(problem, f"{case!r}: {problem}")

    @needs_overlay
    def test_uneven_and_empty_shards_are_exact(self):
        """Lengths that no axis divides, shorter than the mesh, and none at all; with the joint group that stock would
        use, and get wrong."""
        shapes = ((5, 3), (7, 9), (1, 11), (3, 1), (0, 5), (13, 0), (2, 2, 3))
        self.check(*(Case(GRID, s, t, shape) for shape in shapes for s, t in (*MOVES, *REDUCTIONS)))
        beside = [(("S", 1), ("S", 0)), (("S", 0), ("S", 1)), (("P", "sum"), ("S", 1))]
        self.check(*(Case(GRID, s, (s[0], ("R",)), shape) for shape in ((5, 3, 2), (1, 11, 3)) for s in beside))

    @needs_overlay
    def test_uneven_shards_over_three_axes(self):
        kinds = (("R",), ("S", 0), ("P", "sum"))
        targets = itertools.product(kinds[:2], repeat=3)
        ends = itertools.product(itertools.product(kinds, repeat=3), targets)
        self.check(*(Case(CUBE, s, t, (11,)) for s, t in sample(ends, 5)))

    def test_tensors_without_dims(self):
        for op in ("sum", "max"):
            self.check(Case(GRID, (("P", op), ("P", op)), (("R",), ("R",)), ()))
        self.check(
            Case(GRID, (("P", "sum"), ("R",)), (("R",), ("R",)), ()),
            Case(GRID, (("R",), ("R",)), (("R",), ("P", "sum")), ()),
        )

    def test_axes_of_size_one(self):
        recipe = MeshRecipe(RANKS, (1, 8, 1))
        kinds = (("R",), ("S", 0), ("S", 1))
        ends = list(itertools.product(kinds, repeat=3))
        self.check(*(Case(recipe, s, t, (16, 8)) for s in ends[::2] for t in ends[::5]))
        self.check(Case(recipe, (("P", "sum"), ("P", "sum"), ("S", 0)), (("S", 0), ("R",), ("R",)), (16, 8)))

    def test_locals_that_arent_contiguous(self):
        self.check(*(Case(GRID, s, t, (16, 8), contiguous=False) for s, t in (*MOVES, *REDUCTIONS)))

    def test_types_that_backends_move(self):
        self.check(*(Case(GRID, s, t, (16, 8), dtype) for dtype in TYPES for s, t in MOVES))

    @needs_overlay
    def test_types_that_backends_dont_move_travel_as_bytes(self):
        self.check(*(Case(GRID, s, t, shape, d) for d in AS_BYTES for shape in ((16, 8), (5, 3)) for s, t in MOVES))

    def test_values_become_terms(self):
        """R to P, as torch splits values: of n equal terms of a sum each is the n-th part, else each is the value."""
        self.check(*(Case(GRID, (("R",), ("R",)), (("P", op), ("R",)), (8, 8)) for op in ("sum", "avg", "max", "min")))
        self.check(Case(GRID, (("S", 0), ("R",)), (("R",), ("P", "sum")), (8, 8)))
        self.check(Case(GRID, (("P", "sum"), ("R",)), (("R",), ("P", "sum")), (8, 8)))

    @needs_overlay
    def test_rank_orders_of_every_kind(self):
        """Ranks permuted, axes permuted, flattened axes as axes of a mesh, views of a part of the root."""
        recipes = (
            MeshRecipe(SHUFFLED, (2, 4), flattened=("ab",)),
            MeshRecipe(SHUFFLED, (2, 2, 2), view=("c", "a"), flattened=("ac",)),
            MeshRecipe(RANKS, (2, 2, 2), view=("c", "a"), flattened=("ac",)),
            MeshRecipe(RANKS, (2, 2, 2), view=("bc", "a"), flattened=("abc",)),
            MeshRecipe((6, 1, 4, 3, 0, 7), (3, 2), flattened=("ab",)),
        )
        shapes = (16, 8), (7, 5)
        self.check(*(Case(m, s, t, n) for m in recipes for n in shapes for s, t in (*MOVES, *REDUCTIONS)))

    @needs_overlay
    def test_torchs_own_steps_merge_only_where_that_is_exact(self):
        """The way of what isn't planned: lengths of every kind, ranks in any order, averages of whole numbers."""
        from torch_overlay.distributed.tensor import _redistribute
        from torch_overlay.distributed.tensor._runner.answers import Fallback

        recipes = CUBE, MeshRecipe(SHUFFLED, (2, 2, 2), flattened=("ab", "bc", "abc"))
        ends = (
            ((("S", 0), ("S", 0), ("S", 0)), (("R",), ("R",), ("R",))),
            ((("S", 0), ("S", 0), ("S", 0)), (("S", 0), ("R",), ("R",))),
            ((("P", "sum"), ("P", "sum"), ("S", 1)), (("S", 0), ("S", 0), ("R",))),
            ((("P", "avg"), ("P", "sum"), ("P", "sum")), (("R",), ("R",), ("R",))),
        )
        with mock.patch.object(_redistribute, "find_answer", lambda *_: Fallback("a test asks for torch's steps")):
            cases = itertools.product(((16, 8), (12, 3), (7, 5), (3, 1)), recipes, ends)
            self.check(*(Case(mesh, s, t, shape) for shape, mesh, (s, t) in sample(cases, 3)))
            self.check(*(Case(CUBE, s, t, (16, 8), "int64") for s, t in ends[:3]))
            mesh, here = CUBE.make(), CUBE.twin().coordinate(self.rank)
            # 12 is cut into 6, 3 and then 2 and 1: all three steps are merged, or none.
            for length, expected in ((16, 1), (12, 3), (7, 3)):
                case = Case(CUBE, *ends[0], (length, 2))
                with CommDebugMode() as comm:
                    case.run(mesh, case.given(here))
                self.assertEqual(comm.get_total_counts(), expected, length)

    def test_ranks_outside_of_the_mesh_keep_what_they_have(self):
        recipe = MeshRecipe((1, 2, 5, 6), (2, 2), flattened=("ab",))
        self.check(*(Case(recipe, s, t, (8, 4), public=public) for s, t in MOVES for public in (False, True)))

    def test_strided_shards_and_given_orders(self):
        """FSDP2 over TP: the dim is cut by the later axis first."""
        strided, plain = (("SS", 0, 4), ("S", 0)), (("S", 0), ("S", 0))
        whole = (("R",), ("R",))
        ends = [(strided, whole), (whole, strided), (strided, plain), ((("P", "sum"), ("S", 0)), strided)]
        self.check(*(Case(GRID, *pair, (16, 6)) for pair in ends))
        self.check(*(Case(GRID, plain, end, (16, 6), source_order=(1, 0)) for end in (whole, plain)))

    @needs_overlay
    def test_a_strided_shard_is_gathered_at_once(self):
        """The full parameter of FSDP2 over TP: one all-gather, and nothing to warn about."""
        case = Case(GRID, (("SS", 0, 4), ("S", 0)), (("R",), ("R",)), (16, 6))
        mesh, here = GRID.make(), GRID.twin().coordinate(self.rank)
        with CommDebugMode() as comm:
            with self.assertNoLogs("torch.distributed.tensor._redistribute", "WARNING"):
                case.run(mesh, case.given(here))
        counts = {str(op): n for op, n in comm.get_comm_counts().items()}
        self.assertEqual(sum(counts.values()), 1, counts)
        self.assertIn("all_gather_into_tensor", str(counts))

    @needs_package
    def test_an_uneven_strided_shard_is_left_to_torch(self):
        """And is right there, merging being off; the reason is counted."""
        from torch_overlay.report import redistributions

        case = Case(GRID, (("SS", 0, 4), ("S", 0)), (("R",), ("R",)), (10, 3))
        before = sum(redistributions()["redistributions by torch's own code"].values())
        mesh, whole = GRID.make(), torch.arange(30.0).reshape(10, 3)
        there = distribute_tensor(whole, mesh, placed(case.source), src_data_rank=None)
        self.assertEqual(there.redistribute(placements=placed(case.target)).to_local(), whole)
        self.assertGreater(sum(redistributions()["redistributions by torch's own code"].values()), before)

    def test_a_short_shard_is_padded_as_on_stock(self):
        """Of 19 columns each rank has three at most. The third has two: torch adds a column of zeros to them, and the
        others, whose shards are right, find everything in its place."""
        mesh = init_device_mesh(DEVICE, (8,), mesh_dim_names=("tp",))
        whole = torch.arange(3.0 * 19).view(3, 19)
        mine = torch.nn.functional.pad(whole, (0, 5)).chunk(8, 1)[self.rank]
        mine = mine[:, : max(0, min(3, 19 - 3 * self.rank))]
        mine = mine[:, :2] if self.rank == 2 else mine
        given = DTensor.from_local(mine, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride())
        whole[:, 8] = 0
        self.assertEqual(given.redistribute(mesh, [Replicate()]).to_local(), whole)
