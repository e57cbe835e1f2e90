"""DTensors that are redistributed on the way: values and gradients against the same on one whole tensor."""

import itertools
import unittest

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, distribute_tensor
from torch.distributed.tensor import _redistribute as torch_redistribute

from mesh_harness import needs_overlay
from mesh_ranks import WORLD, make_root
from twins_ranks import Case, MeshRecipe, placed

R, S, P = Replicate(), Shard, Partial()
MOVES = (
    ((S(0), S(0)), (R, R)),
    ((S(0), S(1)), (S(1), S(0))),
    ((R, R), (S(1), S(0))),
    ((R, S(0)), (S(0), R)),
)


def grid():
    mesh = make_root(range(WORLD), (2, 4), ("dp", "tp"))
    mesh["dp", "tp"]._flatten("all")
    return mesh


def whole_tensor(*shape):
    """The same on every rank, and no two elements alike."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).sin()


class AutogradCases:
    """Cases for ``EightRanks``."""

    @needs_overlay  # stock's are silently wrong on uneven shards
    def test_gradients_come_back_to_where_the_values_were(self):
        mesh, weight = grid(), whole_tensor(10, 6).cos()
        for source, target in MOVES:
            for shape in ((10, 6), (8, 8)):
                weight = whole_tensor(*shape).cos()
                leaf = distribute_tensor(whole_tensor(*shape), mesh, source, src_data_rank=None).requires_grad_()
                moved = leaf.redistribute(placements=target)
                self.assertEqual(moved.placements, target)
                (moved * distribute_tensor(weight, mesh, target, src_data_rank=None)).sum().full_tensor().backward()
                self.assertEqual(leaf.grad.placements, source)
                self.assertEqual(leaf.grad.full_tensor(), weight)

    def test_a_pending_sum_passes_its_gradient_to_every_term(self):
        mesh, weight = grid(), whole_tensor(8, 6)
        for target in ((R, R), (S(0), S(1)), (S(0), S(0)), (P, R)):
            term = torch.full((8, 6), float(self.rank), dtype=torch.float64, requires_grad=True)
            total = DTensor.from_local(term, mesh, (P, P), run_check=False).redistribute(placements=target)
            self.assertEqual(total.full_tensor(), torch.full((8, 6), 28.0, dtype=torch.float64))
            (total.full_tensor() * weight).sum().backward()
            self.assertEqual(term.grad, weight, str(target))

    @needs_overlay  # before 2.11 stock takes the terms of a gradient for the gradient
    def test_a_pending_gradient_of_a_pending_sum_is_whole(self):
        """Where both are terms, nothing is to be moved, or what is moved says what it is."""
        mesh = grid()
        for target in ((R, R), (P, R), (R, P)):
            term = torch.ones(8, 6, dtype=torch.float64)
            leaf = DTensor.from_local(term, mesh, (P, P), run_check=False).requires_grad_()
            moved = leaf.redistribute(placements=target)
            for pending in ((P, P), (P, R), (P, S(0))):
                local = torch.full((2 if pending[1] == S(0) else 8, 6), float(1 + self.rank), dtype=torch.float64)
                grad = DTensor.from_local(local, mesh, pending, run_check=False)
                (found,) = torch.autograd.grad(moved, leaf, grad, retain_graph=True)
                self.assertEqual(found.full_tensor(), grad.full_tensor(), f"{pending} to {target}")

    @needs_overlay
    def test_strided_shards_become_plain_ones_and_their_gradients_strided_ones(self):
        recipe = MeshRecipe(tuple(range(WORLD)), (2, 4))
        mesh, strided, plain = recipe.make(), (("SS", 0, 4), ("S", 0)), (("S", 0), ("S", 0))
        here = recipe.twin().coordinate(self.rank)
        for source, target in ((strided, plain), (plain, strided)):
            there, back = Case(recipe, source, target, (16, 6), public=True), Case(recipe, target, source, (16, 6))
            self.assertIsNone(there.problem(mesh, self.rank))
            leaf = DTensor.from_local(there.given(here), mesh, placed(source), run_check=False).requires_grad_()
            moved = leaf.redistribute(placements=placed(target))
            self.assertEqual([*map(type, moved.placements)], [*map(type, placed(target))])
            self.assertIsNone(there.difference(moved.to_local(), here))
            grad = DTensor.from_local(back.given(here), mesh, placed(target), run_check=False)
            (found,) = torch.autograd.grad(moved, leaf, grad)
            self.assertEqual([*map(type, found.placements)], [*map(type, placed(source))])
            self.assertIsNone(back.difference(found.to_local(), here))

    @unittest.skipUnless(hasattr(torch_redistribute, "NestedRedistribute"), "torch differentiates once before 2.12")
    def test_second_derivatives(self):
        mesh = grid()
        for source, target in MOVES:
            whole = whole_tensor(8, 8).requires_grad_()
            leaf = distribute_tensor(whole.detach(), mesh, source, src_data_rank=None).requires_grad_()
            first = torch.autograd.grad((leaf.redistribute(placements=target) ** 3).sum(), leaf, create_graph=True)[0]
            (first.redistribute(placements=target) ** 2).sum().backward()
            expected = torch.autograd.grad((whole**3).sum(), whole, create_graph=True)[0]
            (expected**2).sum().backward()
            self.assertEqual(leaf.grad.full_tensor(), whole.grad, f"{source} -> {target}")

    def test_an_embedding_sharded_by_rows_keeps_torchs_mask(self):
        """Its partial values are of torch's own class, which only torch's code can reduce."""
        mesh, table = grid(), whole_tensor(20, 6)
        index = torch.tensor([[3, 19, 0], [7, 11, 12]])
        for placements in ((R, S(0)), (R, S(1))):
            weight = distribute_tensor(table, mesh, placements, src_data_rank=None).requires_grad_()
            found = torch.nn.functional.embedding(distribute_tensor(index, mesh, (R, R), src_data_rank=None), weight)
            whole = found.full_tensor()  # once: torch lets the mask go with it
            self.assertEqual(whole, table[index])
            whole.sum().backward()
            self.assertEqual(weight.grad.full_tensor().sum(), torch.tensor(36.0, dtype=torch.float64))

    def test_async_results_are_waited_for_when_used(self):
        mesh, whole = grid(), whole_tensor(8, 8)
        for source, target in MOVES:
            leaf = distribute_tensor(whole, mesh, source, src_data_rank=None).requires_grad_()
            moved = leaf.redistribute(placements=target, async_op=True)
            self.assertEqual((moved * 2).full_tensor(), whole * 2)
            (moved * moved).sum().full_tensor().backward()
            self.assertEqual(leaf.grad.full_tensor(), 2 * whole)
        total = DTensor.from_local(torch.ones(8), mesh, (P, P), run_check=False)
        later = total.redistribute(placements=(R, R), async_op=True).to_local()
        self.assertEqual(later + 0, torch.full((8,), 8.0))

    @needs_overlay
    def test_results_are_no_views_of_what_was_given(self):
        """Writing to a result leaves the tensor that it came from as it was, and the other way round."""
        mesh = grid()
        for source, target in MOVES:
            before = distribute_tensor(whole_tensor(8, 8), mesh, source, src_data_rank=None)
            kept = before.to_local().clone()
            after = before.redistribute(placements=target)
            after.to_local().zero_()
            self.assertEqual(before.to_local(), kept, f"{source} -> {target}")
            self.assertTrue(after.to_local().is_contiguous())
        whole = distribute_tensor(torch.zeros(8, 8), mesh, (R, R), src_data_rank=None)
        piece = whole.redistribute(placements=(S(0), R)).to_local()
        self.assertEqual(piece.untyped_storage().nbytes(), piece.numel() * 4)  # not a view that keeps the whole alive

    def test_half_precision_in_the_collectives(self):
        """forward_dtype and backward_dtype convert around them."""
        mesh, whole = grid(), torch.arange(64.0).reshape(8, 8)
        leaf = distribute_tensor(whole, mesh, (S(0), S(1)), src_data_rank=None).requires_grad_()
        got = leaf.redistribute(placements=(R, R), forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
        self.assertEqual(got.to_local().dtype, torch.bfloat16)
        got.to_local().float().sum().backward()
        self.assertEqual((leaf.grad.dtype, leaf.grad.full_tensor().sum()), (torch.float32, torch.tensor(64.0)))

    @needs_overlay  # torch casts by a spec of placements alone, and permutes the values
    def test_a_cast_keeps_the_shard_order(self):
        mesh, whole = grid(), torch.arange(64.0).reshape(16, 4)
        order = (_dtensor_spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        meta = _dtensor_spec.TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = _dtensor_spec.DTensorSpec(mesh, (S(0), S(0)), tensor_meta=meta, shard_order=order)
        row, column = mesh.get_coordinate()
        part = whole.chunk(4)[column].chunk(2)[row].clone()
        for wants, types in itertools.product(
            (False, True), ((torch.float64, None), (torch.float64, torch.bfloat16), (None, torch.float64))
        ):
            local = part.clone().requires_grad_(wants)
            leaf = DTensor(local, spec, requires_grad=wants)  # rows cut by tp first, then by dp
            for target in ((R, R), (S(0), R), (S(1), S(0))):
                found = leaf.redistribute(placements=target, forward_dtype=types[0], backward_dtype=types[1])
                self.assertEqual(found.to_local().dtype, types[0] or torch.float32)
                self.assertEqual(found.full_tensor().float(), whole, f"{target}, {types}")
                if wants:
                    leaf.grad = None
                    (found.full_tensor() * whole).sum().backward()
                    self.assertEqual(leaf.grad.full_tensor(), whole, f"{target}, {types}")
