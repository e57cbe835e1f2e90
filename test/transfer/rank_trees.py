"""Trees of tensors redistributed together on real ranks: the same bits as one by one, in few collectives."""

import gc
import itertools
import pathlib
import sys
from unittest import mock

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import torch_overlay
from mesh_ranks import SHUFFLED, WORLD, make_root
from on_device import DEVICE
from torch_overlay.distributed.tensor._planner.regions import NotPlanned
from torch_overlay.transfers import mesh_moves
from width import NIGHTLY

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

from benchmarks.allocations import allocated
from benchmarks.pairs import parameters

R, S, P = Replicate(), Shard, Partial()
MOVED = (R, S(0), S(1))


def filled(mesh, shape, placements, dtype=torch.float32):
    """A tensor of different whole numbers, cut as the placements say; terms of a sum differ by rank."""
    whole = torch.arange(shape[0] * shape[1]).reshape(shape) % 101
    kept = [R if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(whole.to(dtype), mesh, kept, src_data_rank=None).to_local()
    if kept != list(placements):
        local = local + mesh.get_coordinate()[0]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))


class Odd(Partial):
    """Calls itself equal to its base."""


class TreeCases:
    """Cases for ``EightRanks``."""

    def check_tree(self, tree, placements, most, **how):
        """As one by one; with at most so many collectives."""
        with CommDebugMode() as comm:
            found = torch_overlay.redistribute(tree, placements=placements, **how)
        for name, tensor in tree.items():
            target = placements[name] if isinstance(placements, dict) else placements
            alone = tensor.redistribute(placements=[target] * 2 if not isinstance(target, (list, tuple)) else target)
            self.assertEqual(found[name].placements, alone.placements)
            self.assertEqual((found[name].shape, found[name].stride()), (alone.shape, alone.stride()))
            self.assertEqual(found[name].to_local(), alone.to_local(), f"{name}: {tensor.placements} to {target}")
        self.assertTrue(comm.get_total_counts() <= most, comm.get_comm_counts())

    def test_every_move_of_a_grid_goes_in_one_exchange(self):
        pairs = itertools.product(itertools.product(MOVED, repeat=2), repeat=2)
        moves = {f"{number}": pair for number, pair in enumerate(pairs)}
        for ranks, shape, dtype in ((range(WORLD), (9, 6), torch.float32), (SHUFFLED, (3, 8), torch.bfloat16)):
            mesh = make_root(ranks, (4, 2), ("dp", "tp"))
            tree = {name: filled(mesh, shape, source, dtype) for name, (source, _) in moves.items()}
            self.check_tree(tree, {name: list(target) for name, (_, target) in moves.items()}, most=1)

    def test_a_run_stays_within_its_budget(self):
        """By the events of the allocator, beyond sources and targets; in as many exchanges as the budget asks for."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        runs = [(1 << 15, 40, budget) for budget in (1 << 17, 1 << 20, 1 << 24)]
        if NIGHTLY:  # up to 690 MB pass through a rank
            runs = [(1 << 18, 150, 1 << 20), (1 << 18, 300, 1 << 24), (1 << 19, 2400, 1 << 28)]
        for size, many, budget in runs:
            source = parameters(mesh, size, many)
            target = torch_overlay.redistribute(source, placements=lambda name, tensor: (S(1), R))
            with torch_overlay.Transfer(source, target, budget=budget) as transfer:
                (memory,) = allocated([transfer.run])
                passing = max(out + into + max(out, into) for out, into, _ in transfer.traffic.values())
                count = transfer.exchanges
            if NIGHTLY and self.rank == 0:
                print(
                    f"budget {budget >> 20} MB: {count} exchanges of {passing >> 20} MB, peak {memory.peak / 2**20:.1f}"
                )
            self.assertTrue(budget // 4 < memory.peak <= budget or count == 1, (memory, budget, count))
            self.assertTrue(memory.peak <= budget and memory.kept == 0, (memory, budget))
            self.assertTrue(abs(count - -(-passing // budget)) <= 1, (count, passing, budget))

    def test_results_of_reductions_take_the_budget_or_one_tensor(self):
        """To another mesh, where they are held until they are sent; by the events of the allocator."""
        mesh, other = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (8,), ("ep",))
        leaf = 128 * 64 * 4
        tree = {f"{n}": filled(mesh, (128, 64), (P, R)) for n in range(24)}
        tree["moved"] = filled(mesh, (64, 64), (S(0), S(1)))
        for budget in (1 << 17, 1 << 22):
            (memory,) = allocated([lambda: torch_overlay.redistribute(tree, other, S(0), budget=budget)])  # noqa: B023
            self.assertTrue(memory.peak - memory.kept <= 2 * budget + 3 * leaf, (memory, budget))

    def test_axes_without_a_change_take_no_part(self):
        """Each row of the mesh by itself, at its own time; what isn't a tensor passes through."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        if mesh.get_coordinate()[0] == 2:
            tree = {
                "a": [filled(mesh, (8, 5), (S(0), S(1))), 3, None],
                "b": (filled(mesh, (7, 4), (S(1), S(0))), "text"),
            }
            found = torch_overlay.redistribute(tree, placements=lambda name, tensor: [tensor.placements[0], R])
            self.assertEqual((found["a"][1:], found["b"][1]), ([3, None], "text"))
            self.assertEqual(found["a"][0].placements, (S(0), R))
            self.assertEqual(found["b"][0].to_local(), (torch.arange(28.0).reshape(7, 4) % 101)[:, 2:3])

    def test_without_a_joint_group(self):
        with torch_overlay.enabled(flatten="existing"):
            cube = make_root(range(WORLD), (2, 2, 2), ("a", "b", "c"))
            mesh = cube["a", "c"]
            tree = {f"{n}": filled(mesh, (8, 6), (S(n % 2), S(n // 2 % 2))) for n in range(8)}
            # What moves along one axis needs no other group: one exchange for all that move along it.
            tree |= {f"dp {n}": filled(mesh, (8 + n, 6), (S(n % 2), R)) for n in range(6)}
            tree |= {f"tp {n}": filled(mesh, (8 + n, 6), (R, S(n % 2))) for n in range(6)}
            self.check_tree(tree, R, most=2 + 2 * 8)

    def test_to_another_mesh_and_back_with_gradients(self):
        """Disjoint, overlapping and equal ranks; a rank outside of a mesh holds nothing."""
        for ranks, others in (((0, 1, 2, 3), (4, 5, 6, 7)), ((5, 4, 3, 2, 1, 0), (6, 2, 0, 7)), (range(8), SHUFFLED)):
            mesh = make_root(ranks, (len(ranks) // 2, 2), ("dp", "tp"))
            other = make_root(others, (2, len(others) // 2), ("ep", "tp"))
            whole = torch.arange(45.0).reshape(9, 5)
            tree = {}
            for name, placements in (("a", (S(0), S(1))), ("b", (R, S(0))), ("c", (S(0), R))):
                tree[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None).requires_grad_()
            rule = {"a": (R, S(0)), "b": (S(1), S(0)), "c": (R, R)}
            found = torch_overlay.redistribute(tree, other, rule)
            loss = torch.zeros(())
            for name, tensor in found.items():
                want = distribute_tensor(whole, other, rule[name], src_data_rank=None)
                self.assertEqual((tensor.device_mesh, tensor.placements), (other, rule[name]))
                self.assertEqual(tensor.to_local().reshape(-1), want.to_local().reshape(-1))
                weight = want.to_local() + 1 if self.rank in others else 1
                weighted = tensor.to_local() * weight
                loss = loss + weighted.sum()
            loss.backward()
            for tensor in tree.values() if self.rank in ranks else ():
                self.assertEqual(tensor.grad.device_mesh, mesh)
                self.assertEqual(tensor.grad.placements, tensor.placements)
                self.assertEqual(tensor.grad.to_local().reshape(-1), tensor.detach().to_local().reshape(-1) + 1)

    def test_the_method_goes_to_another_mesh(self):
        """With its gradient, in another type if asked; and torch's own error is there without the overlay."""
        mesh, other = make_root(range(6), (3, 2), ("dp", "tp")), make_root((7, 2, 6, 4), (4,), ("ep",))
        whole = torch.arange(45.0).reshape(9, 5)
        for placements in ((S(0),), (S(1),), (R,)):
            tensor = distribute_tensor(whole, mesh, (S(0), S(1)), src_data_rank=None).requires_grad_()
            found = tensor.redistribute(other, placements, forward_dtype=torch.float64)
            want = distribute_tensor(whole.double(), other, placements, src_data_rank=None)
            self.assertEqual((found.device_mesh, found.placements, found.dtype), (other, placements, torch.float64))
            self.assertEqual(found.to_local().reshape(-1), want.to_local().reshape(-1))
            local = found.to_local()
            (local * local).sum().backward()
            if self.rank < 6:
                self.assertEqual((tensor.grad.placements, tensor.grad.dtype), ((S(0), S(1)), torch.float32))
                self.assertEqual(tensor.grad.to_local(), 2 * tensor.detach().to_local())
        with self.assertRaisesRegex(NotImplementedError, "Leave backward_dtype out"):
            tensor.redistribute(other, (R,), backward_dtype=torch.float16)
        torch_overlay.disable()
        try:
            with self.assertRaisesRegex(NotImplementedError, "Cross device mesh comm not supported"):
                tensor.redistribute(other, (R,))
        finally:
            torch_overlay.enable(**self.overlay_options)

    def test_compiled_code_goes_to_another_mesh_beside_its_graphs(self):
        """A graph break, where dynamo followed our code with stand-ins for meshes; with none allowed, the error says
        what to do."""
        mesh, line = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (8,), ("ep",))
        ways = (
            lambda given, to, placements: (given * 2).redistribute(to, placements),
            lambda given, to, placements: torch_overlay.redistribute({"a": given * 2}, to, placements)["a"],
        )
        for moved, to, placements in ((ways[0], line, [S(1)]), (ways[1], line, [R])):
            given, again = (filled(mesh, (8, 8), (S(0), S(1))).requires_grad_() for _ in range(2))
            torch._dynamo.reset()
            found = torch.compile(moved, backend="aot_eager")(given, to, placements)
            want = moved(again, to, placements)
            self.assertEqual((found.device_mesh, found.placements), (to, tuple(placements)))
            self.assertEqual(found.to_local(), want.to_local())
            for result in (found, want):
                (result * 3).sum().backward()
            self.assertEqual(given.grad.to_local(), again.grad.to_local())
            torch._dynamo.reset()
            with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "torch.compiler.disable"):
                torch.compile(moved, backend="aot_eager", fullgraph=True)(given, to, placements)

    def test_of_budgets_that_differ_the_smallest_counts(self):
        """On one mesh and to another: once, again, and after all ranks gave others. Ranks hung until the timeout."""
        mesh, other = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (2, 4), ("a", "b"))
        counts = []

        class Counted(mesh_moves.Exchanges):
            def __init__(self, schedule, count, *given):
                counts.append(count)
                super().__init__(schedule, count, *given)

        tree = {name: filled(mesh, (64, 32), (S(0), S(1))) for name in "ab"}
        with mock.patch.object(mesh_moves, "Exchanges", Counted):
            for to, placements in ((None, (S(1), S(0))), (other, (S(1), R))):
                for large, small in ((1 << 20, 4000), (1 << 20, 4000), (1 << 18, 3000), (1 << 19, 1 << 20)):
                    budget = small if self.rank == 5 else large
                    counts.clear()
                    found = torch_overlay.redistribute(tree, to, placements, budget=budget)
                    self.assertTrue(min(large, small) < 10_000 or not counts or counts == [1], (counts, small))
                    self.assertTrue(min(large, small) > 10_000 or not counts or counts[0] > 1, (counts, small))
                    for tensor in found.values():
                        whole = torch.arange(64 * 32).reshape(64, 32) % 101
                        want = distribute_tensor(whole.float(), to or mesh, placements, src_data_rank=None)
                        self.assertEqual(tensor.to_local(), want.to_local())

    def test_what_ranks_ask_for_is_the_same(self):
        """Ranks that asked for different placements sent one another's shards by two different plans."""
        mesh, other = make_root(range(WORLD), (8,), ("dp",)), make_root(SHUFFLED, (2, 4), ("a", "b"))
        tree = {"a": filled(mesh, (16, 8), (S(0),)), "b": filled(mesh, (16, 8), (S(0),))}
        for to, placements, odd, words in (
            (
                None,
                R,
                S(1),
                r"'b' goes from .Shard.dim=0.,. to .Replicate..,. on ranks 0, 1, 3, 4, 5, 6, 7, and 'b' goes "
                r"from .* to .Shard.dim=1.,. on rank 2",
            ),
            (other, (R, S(0)), (S(0), R), "'b' goes from .* on rank 2"),
        ):
            given = {"a": placements, "b": odd if self.rank == 2 else placements}
            with self.assertRaisesRegex(ValueError, f"over ranks 0-7 is the same on all .* they differ: {words}"):
                torch_overlay.redistribute(tree, to, given)
            some = {"a": tree["a"]} if self.rank == 2 else tree
            with self.assertRaisesRegex(ValueError, "nothing more is moved on rank 2"):
                torch_overlay.redistribute(some, to, dict.fromkeys(some, placements))
            found = torch_overlay.redistribute(tree, to, placements)["b"]
            self.assertEqual(found.full_tensor(), tree["b"].full_tensor())

    def test_plans_that_are_remembered_and_forgotten(self):
        """Plans to another mesh: of the same specs made once, with the values of each time; whatever a rank forgot."""
        mesh, other = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root(SHUFFLED, (2, 4), ("a", "b"))
        gc.collect()
        plan, worlds = mesh_moves._MeshPlan.of, len(mesh_moves._plans)
        for budget in (1 << 20, 3000):
            with mock.patch.object(mesh_moves._MeshPlan, "of", mock.Mock(side_effect=plan)) as made:
                others = [((16, 8), (S(0), S(1))), ((16, 9), (R, S(0))), ((16, 9), (P, S(0)))]
                for number, (shape, before) in enumerate([((16, 9), (S(0), S(1)))] * 3 + others * 2):
                    whole = torch.arange(shape[0] * shape[1]).reshape(shape) * 1.0 + number
                    kept = [R if each == P else each for each in before]
                    local = distribute_tensor(whole, mesh, kept, src_data_rank=None).to_local()
                    tensor = DTensor.from_local(local, mesh, before, shape=shape, stride=(shape[1], 1))
                    if number == 4 and self.rank == 3:
                        mesh_moves._plans.clear()
                    found = torch_overlay.redistribute([tensor], other, (S(1), S(0)), budget=budget)[0]
                    whole = whole * (4 if P in before else 1)
                    want = distribute_tensor(whole, other, (S(1), S(0)), src_data_rank=None)
                    self.assertEqual(found.to_local(), want.to_local())
            self.assertEqual(made.call_count, 5 if self.rank == 3 else 4)
        # The result lies on the mesh that is asked for, though an older one is equal; a subclass is another placement.
        again = DeviceMesh(DEVICE, torch.tensor(SHUFFLED).reshape(2, 4), mesh_dim_names=("a", "b"))
        self.assertTrue(torch_overlay.redistribute([tensor], again, (S(1), S(0)))[0].device_mesh is again)
        odd = DTensor.from_local(tensor.to_local(), mesh, (Odd(), S(0)), shape=shape, stride=(shape[1], 1))
        with self.assertRaisesRegex(NotPlanned, "has a pending Odd"):
            torch_overlay.redistribute([odd], again, (S(1), S(0)))
        kept = mesh_moves._plans[distributed_c10d._get_default_group()]
        self.assertEqual(len(kept), mesh_moves.PLANS)
        self.reopen_world()
        gc.collect()
        self.assertTrue(len(mesh_moves._plans) <= worlds)
