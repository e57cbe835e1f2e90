"""Every move and every reduction of two meshes, by real collectives: right values, and few collectives."""

import contextlib
import dataclasses
import itertools
from unittest import mock

from torch.distributed.tensor.debug import CommDebugMode

from mesh_harness import STOCK, needs_overlay
from mesh_ranks import SHUFFLED
from torch_overlay.distributed.tensor._planner.cost import Cost
from torch_overlay.distributed.tensor._planner.steps import AllToAll
from torch_overlay.distributed.tensor._runner import exchange
from twins_ranks import Case, MeshRecipe, bytes_decide
from twins_tensor import Case as Planned
from way import needs_package
from width import NIGHTLY, sample

KINDS = (("R",), ("S", 0), ("S", 1))
CUBE = MeshRecipe(tuple(range(8)), (2, 2, 2), flattened=("ab", "ac", "bc", "abc"))
GRID = MeshRecipe(tuple(range(8)), (4, 2), flattened=("ab",))
DTYPES = "float32", "int16", "bool"


def pairs(axes: int, pending: bool):
    """Source and target placements: all moves, or all reductions to values."""
    ends = KINDS if not pending else (*KINDS, ("P", "sum"))
    for source, target in itertools.product(
        itertools.product(ends, repeat=axes), itertools.product(KINDS, repeat=axes)
    ):
        if source != target and (("P", "sum") in source) == pending:
            yield source, target


def runs_as_large(really: bool):
    """Small tensors run as those of a megabyte do; a rank chooses for itself, so some may and others not."""
    if STOCK or not really:
        return contextlib.nullcontext()

    return mock.patch.object(exchange, "LARGE_BYTES", {"cpu": 0})


def in_rounds():
    """Small tensors go in as many rounds as large ones; on all ranks alike."""
    if STOCK:
        return contextlib.nullcontext()
    from torch_overlay.distributed.tensor._planner import cost

    return mock.patch.object(cost, "_ASSUMED", {"cpu": Cost(round_bytes=1)})


class MoveCases:
    """Cases for ``EightRanks``."""

    def check_pairs(self, recipe: MeshRecipe, pending: bool, most: int, every: int = 1) -> int:
        """Pairs on 16 x 16, each with at most so many collectives, on odd ranks as if it were large; how many."""
        mesh, here = recipe.make(), recipe.twin().coordinate(self.rank)
        ends = sample(pairs(len(recipe.sizes), pending), every)
        cases = [Case(recipe, source, target, (16, 16)) for source, target in ends]
        given, results, counts = [case.given(here) for case in cases], [], [0]
        with CommDebugMode() as comm, runs_as_large(self.rank % 2 == 1):
            for case, local in zip(cases, given, strict=True):
                results.append(case.run(mesh, local))
                counts.append(comm.get_total_counts())
        for case, result in zip(cases, results, strict=True):
            problem = case.difference(result, here)
            self.assertIsNone(problem, f"{case!r}: {problem}")
        for case, before, after in zip(cases, counts, counts[1:], strict=False):
            self.assertTrue(STOCK or after - before <= most, f"{case!r}: {after - before} collectives")
        return len(cases)

    def test_each_move_of_a_cube_takes_one_collective(self):
        self.assertEqual(self.check_pairs(CUBE, pending=False, most=1, every=7), 27 * 26 if NIGHTLY else 101)

    def test_each_reduction_of_a_cube_takes_two_collectives(self):
        self.assertEqual(self.check_pairs(CUBE, pending=True, most=2, every=11), 37 * 27 if NIGHTLY else 91)

    def test_moves_and_reductions_of_a_grid(self):
        self.assertEqual(self.check_pairs(GRID, pending=False, most=1), 9 * 8)
        self.assertEqual(self.check_pairs(GRID, pending=True, most=2), 7 * 9)

    @needs_package
    def test_in_rounds_they_give_the_same(self):
        """Small tensors in as many rounds as large ones; pieces with fewer elements than rounds, and without any."""
        with in_rounds(), CommDebugMode() as comm:
            cases = 0
            for number, shape in enumerate(((16, 16), (9, 7), (4, 3, 2))):
                mesh, here = CUBE.make(), CUBE.twin().coordinate(self.rank)
                for pending in (False, True):
                    for source, target in sample(pairs(3, pending), 139, 46 * number):
                        kind = {} if pending else {"dtype": DTYPES[number]}
                        case = Case(CUBE, source, target, shape, **kind)
                        self.assertIsNone(case.difference(case.run(mesh, case.given(here)), here), repr(case))
                        cases += 1
        self.assertGreater(comm.get_total_counts(), 2 * cases)

    @needs_package
    def test_pieces_from_balanced_senders(self):
        """Without latency, a plan takes replicas other than the nearest wherever that balances what ranks send: even
        and uneven pieces, in groups whose ranks are in any order, of types that travel as they are or as bytes."""
        balanced = 0
        for ranks, sizes, shape in (
            (SHUFFLED, (2, 4), (16, 16)),
            (SHUFFLED, (2, 2, 2), (8, 8)),
            (SHUFFLED, (4, 2), (9, 7)),
        ):
            recipe = MeshRecipe(ranks, sizes, flattened=("ab", "ac", "bc", "abc")[: 1 if len(sizes) == 2 else 4])
            mesh, first = recipe.make(), Case(recipe, (), (), shape)
            with bytes_decide() as cost:
                three = len(sizes) == 3
                for number, (source, target) in enumerate(sample(pairs(len(sizes), pending=False), 3 if three else 1)):
                    plan = Planned(source, target, shape, sizes, cost=cost).steps()
                    if any(isinstance(step, AllToAll) and step.diagonals for step in plan):
                        case = dataclasses.replace(first, source=source, target=target, dtype=DTYPES[number % 3])
                        self.assertIsNone(case.problem(mesh, self.rank), repr(case))
                        balanced += 1
        self.assertGreater(balanced, 100 if NIGHTLY else 30)

    @needs_overlay
    def test_a_collective_that_moves_nothing_isnt_run(self):
        """What every rank has already is cut out of it; an axis of size 1 needs nobody."""
        flat = MeshRecipe(tuple(range(8)), (1, 8))
        for recipe, source, target in (
            (CUBE, (("R",),) * 3, (("S", 0), ("S", 1), ("S", 0))),
            (CUBE, (("S", 0), ("R",), ("R",)), (("S", 0), ("S", 0), ("S", 1))),
            (flat, (("S", 0), ("R",)), (("R",), ("S", 1))),
            (flat, (("P", "sum"), ("S", 0)), (("S", 1), ("S", 0))),
        ):
            case = Case(recipe, source, target, (16, 16))
            mesh, here = recipe.make(), recipe.twin().coordinate(self.rank)
            with CommDebugMode() as comm:
                result = case.run(mesh, case.given(here))
            self.assertIsNone(case.difference(result, here))
            self.assertEqual(comm.get_total_counts(), 0, repr(case))
