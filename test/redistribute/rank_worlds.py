"""Groups, options and worlds around redistribution: policies, private groups, new worlds, the overlay on and off."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mesh_harness import STOCK, needs_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from rank_moves import in_rounds
from way import needs_package

R, S, P = Replicate(), Shard, Partial()


def gathers(mesh, whole: torch.Tensor) -> tuple[int, bool]:
    """Shards on every axis, gathered: how many collectives that takes, and whether the whole came back."""
    placed = distribute_tensor(whole, mesh, [S(0)] * mesh.ndim, src_data_rank=None)
    with CommDebugMode() as comm:
        found = placed.redistribute(placements=[R] * mesh.ndim).to_local()
    return comm.get_total_counts(), torch.equal(found, whole)


def four_ranks():
    """A mesh of half of the ranks, since each compiles for itself; the others are outside of it."""
    mesh = make_root(range(4), (2, 2), ("dp", "tp"))
    if not STOCK or mesh.get_coordinate() is not None:  # on stock, ranks outside of a mesh can't slice it
        mesh["dp", "tp"]._flatten("all")
    return mesh


def counted() -> dict:
    from torch_overlay.report import redistributions

    return redistributions()


class WorldCases:
    """Cases for ``EightRanks``."""

    @needs_package
    def test_the_policies_for_groups(self):
        """whole: one over all axes; existing: what the user flattened."""
        import torch_overlay

        whole = torch.arange(70.0).reshape(35, 2)
        expected = {"existing": (3, 2), "whole": (1, 2)}
        for policy, counts in expected.items():
            with torch_overlay.enabled(flatten=policy):
                cube = make_root(SHUFFLED, (2, 2, 2), ("a", "b", "c"))
                pair = cube["a", "b"]
                found = [gathers(cube, whole), gathers(pair, whole)]
                self.assertEqual(found, [(count, True) for count in counts], policy)
                torch_overlay.prepare(pair)  # which its owner may do under any of them
                self.assertEqual(gathers(pair, whole), (1, True), policy)
                other = make_root(SHUFFLED, (2, 2, 2), ("a", "b", "c"))
                other["a", "b"]._flatten("ab")
                self.assertEqual(gathers(other["a", "b"], whole), (1, True), policy)
        with torch_overlay.enabled(flatten="existing"):  # what `whole` made isn't used
            self.assertEqual([gathers(other, whole), gathers(other["b", "c"], whole)], [(2, True), (2, True)])

    @needs_overlay
    def test_another_mesh_over_the_same_ranks_lends_nothing(self):
        make_root(range(WORLD), (4, 2), ("x", "y"))
        cube = make_root(range(WORLD), (2, 2, 2), ("a", "b", "c"))
        self.assertEqual(gathers(cube["a", "b"], torch.arange(12.0)), (2, True))

    def test_a_new_world_has_new_groups(self):
        """The same mesh in a world made anew: the plans of the old one, whose groups are gone, aren't run."""
        for _ in range(3):
            mesh = make_root(range(WORLD), (2, 4), ("dp", "tp"))
            mesh["dp", "tp"]._flatten("all")
            self.assertTrue(gathers(mesh, torch.arange(24.0).reshape(8, 3))[1])
            total = DTensor.from_local(torch.ones(8), mesh, (P, P), run_check=False)
            self.assertEqual(total.redistribute(placements=(S(0), R)).full_tensor(), torch.full((8,), 8.0))
            self.reopen_world()

    @needs_package
    def test_the_overlay_goes_off_and_on_in_the_middle(self):
        """The same tensor, moved by stock and by plan in turn; off is off."""
        import torch_overlay

        mesh, whole = make_root(range(WORLD), (2, 4), ("dp", "tp")), torch.arange(64.0).reshape(8, 8)
        placed = distribute_tensor(whole, mesh, (S(0), S(1)), src_data_rank=None)
        for _ in range(2):
            before = counted()["redistributions by plan"]
            placed = placed.redistribute(placements=(S(1), S(0)))
            self.assertEqual(counted()["redistributions by plan"], before + 1)
            torch_overlay.disable()
            try:
                placed = placed.redistribute(placements=(S(0), S(1)))
                self.assertEqual(placed.full_tensor(), whole)
                self.assertEqual(counted()["redistributions by plan"], before + 1)
            finally:
                torch_overlay.enable(check_mesh=True)
        self.assertEqual(placed.full_tensor(), whole)

    def test_compiled_for_open_sizes_they_give_the_same_numbers(self):
        """Forward and backward; one graph serves all multiples of the mesh's size, here of exchanges in rounds."""
        mesh = four_ranks()
        if mesh.get_coordinate() is None:
            return

        def moves(local):
            placed = DTensor.from_local(local, mesh, (S(0), S(1)), run_check=False)
            swapped = placed.redistribute(placements=(S(1), S(0))).to_local().sin().sum()
            total = DTensor.from_local(local, mesh, (P, P), run_check=False).redistribute(placements=(S(0), R))
            return (
                placed.redistribute(placements=(R, R)).to_local().sin().sum() + swapped + total.to_local().cos().sum()
            )

        graphs = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(moves, backend=graphs, fullgraph=True, dynamic=True)
        for rows, columns in ((8, 16), (40, 24)):
            local = (torch.arange(float(rows * columns)).reshape(rows, columns) + self.rank).sin().double()
            found = []
            for run in (moves, fast):
                leaf = local.clone().requires_grad_()
                with in_rounds():
                    value = run(leaf)
                    value.backward()
                found.append((value.detach(), leaf.grad))
            self.assertEqual(found[0], found[1])
        self.assertEqual(graphs.frame_count, 1)
