"""Norms of gradients, as torch's functions for clipping take them under the overlay."""

import itertools
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad, get_total_norm

from mesh_ranks import WORLD, make_root
from width import NIGHTLY, sample

# The last one is cut into fewer shards than there are ranks on an axis; the whole of each has no zero.
WHOLES = [
    torch.arange(1.0, 1 + rows * columns).reshape(rows, columns) / 7 for rows, columns in ((16, 8), (5, 6), (3, 2))
]
ORDERS = [(order, foreach) for order in (2.0, math.inf) for foreach in (True, False)]
ORDERS += [(order, None) for order in (1, 3, "inf", -1.0, -math.inf)]
ORDERS += [(0, None)]
FEWER_ORDERS = ORDERS if NIGHTLY else ORDERS[::3]  # on further meshes: 2 and inf, a sum, a least and a count


class NormCases:
    """Cases for ``EightRanks``."""

    def weights(self, homes, factor=1.0):
        """Of each whole gradient one in each of these homes, a mesh with placements or None; and all wholes."""
        weights, wholes = [], []
        for (mesh, placements), whole in itertools.product(homes, WHOLES):
            weight, whole = nn.Parameter(torch.zeros_like(whole)), whole * factor * (len(weights) - 3.5)
            if mesh is not None:
                weight = nn.Parameter(distribute_tensor(weight.data, mesh, placements, src_data_rank=None))
            mine = whole.clone()  # before 2.10 a shard may be a view of what was distributed
            weight.grad = mine if mesh is None else distribute_tensor(mine, mesh, placements, src_data_rank=None)
            weights.append(weight)
            wholes.append(whole)
        return weights, wholes

    def check_norms(self, homes, meshes, orders=ORDERS):
        """The norm and the clipped gradients are those of the whole tensors, in one all-reduce a mesh."""
        for norm_type, foreach in orders:
            weights, wholes = self.weights(homes)
            want = get_total_norm(wholes, norm_type)
            with CommDebugMode() as comm:
                norm = nn.utils.clip_grad_norm_(weights, 1.0, norm_type, foreach=foreach)
            self.assertEqual(comm.get_total_counts(), meshes)
            self.assertIs(type(norm), DTensor if len({mesh for mesh, _ in homes}) == 1 else torch.Tensor)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self.assertEqual(norm, want, rtol=1e-5, atol=0)
            for weight, whole in zip(weights, wholes):
                found, clipped = weight.grad, whole * (1 / (want + 1e-6)).clamp(max=1.0)
                if isinstance(found, DTensor):
                    clipped = distribute_tensor(clipped, found.device_mesh, found.placements, src_data_rank=None)
                    found, clipped = found.to_local(), clipped.to_local()
                self.assertEqual(found, clipped, rtol=1e-5, atol=1e-7)

    def test_norms_on_one_mesh(self):
        """Some shards are empty, and torch's own norm without bounds ends the ranks that have one."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        self.check_norms(
            [(mesh, (Shard(0), Shard(1))), (mesh, (Shard(0), Replicate())), (mesh, (Shard(1), Shard(1)))], 1
        )
        self.check_norms([(mesh, (Shard(0), Shard(0)))], 1, FEWER_ORDERS)

    def test_norms_on_several_meshes(self):
        """Dense weights, norms without TP and experts: one all-reduce for each mesh, and each gradient is scaled."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        experts = make_root(range(WORLD), (2, 4), ("efsdp", "ep"))
        homes = [(mesh, (Shard(0), Shard(1))), (mesh["dp"], (Shard(0),)), (experts, (Shard(1), Shard(0)))]
        self.check_norms([*homes, (mesh, (Replicate(), Shard(0)))], 3, FEWER_ORDERS)

    def test_plain_gradients_count_once(self):
        """Beside DTensors on one mesh or on several; first, in between, last."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        dense, plain = (mesh, (Shard(0), Shard(1))), (None, ())
        self.check_norms([plain, dense], 1, FEWER_ORDERS)
        self.check_norms([dense, plain, (mesh["dp"], (Shard(0),)), plain], 2, FEWER_ORDERS)

    def test_a_norm_that_an_empty_shard_has_not(self):
        """2 rows over 4 ranks: on stock two ranks raise, and the others wait for them until their timeout."""
        grid = make_root(range(WORLD), (2, 4), ("dp", "tp"))
        homes = [(grid["tp"], (Shard(0),)), (grid, (Shard(0), Shard(0))), (grid, (Shard(1), Shard(0)))]
        shapes = [(2, 5), (8, 8), (1, 1), (5, 3)]  # 5 over 4 are 2, 2, 1 and none
        norms = [
            lambda whole, order: torch.linalg.vector_norm(whole, order),
            lambda whole, order: torch.linalg.vector_norm(whole, order, dim=0),
            lambda whole, order: torch.linalg.vector_norm(whole, order, dim=(-2, 1), keepdim=True),
            lambda whole, order: whole.norm(order),
            lambda whole, order: torch._foreach_norm([whole, whole * 2], order)[1],
            lambda whole, order: get_total_norm([whole, whole * 2], order),
        ]
        for (mesh, placements), shape, norm in sample(itertools.product(homes, shapes, norms), 5):
            whole = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape) - 3.5
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            for order in (math.inf, -math.inf, -1.0, 2.0):
                found, want = norm(tensor, order).full_tensor(), norm(whole, order)
                self.assertEqual(found, want, rtol=1e-5, atol=0, msg=f"{placements} of {shape}, order {order}")

    def test_compiled_code_takes_the_norm_of_empty_shards(self):
        line = make_root(range(WORLD), (8,), ("dp",))
        for rows, dynamic in ((2, False), (8, True)):
            whole = torch.arange(1.0, 1 + rows * 3).reshape(rows, 3) - 3.5
            tensor = distribute_tensor(whole, line, (Shard(0),), src_data_rank=None)
            torch._dynamo.reset()
            norm = torch.compile(torch.linalg.vector_norm, backend="aot_eager", fullgraph=True, dynamic=dynamic)
            self.assertEqual(norm(tensor, math.inf).full_tensor(), whole.abs().max())

    def test_pending_gradients_are_brought_together_first(self):
        """The greatest of a sum isn't the greatest term, nor its norm that of the terms."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        term = torch.tensor([[3.0, 5.0]]) * (1 - 2 * mesh.get_local_rank("tp"))
        local = term if mesh.get_local_rank("dp") == 0 else term[:0]
        pending = DTensor.from_local(local, mesh, (Shard(0), Partial()), shape=(1, 2), stride=(2, 1))
        for given in ([pending], [pending, torch.ones(2)]):
            for order in (2.0, 1.0, math.inf):
                want = get_total_norm([torch.zeros(1, 2), *given[1:]], order)
                norm = get_total_norm(given, order)
                self.assertEqual(norm.full_tensor() if isinstance(norm, DTensor) else norm, want)

    def test_a_norm_that_is_not_finite_is_an_error_on_all_ranks(self):
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        homes = [(mesh, (Shard(0), Shard(0))), (mesh["dp"], (Shard(0),)), (None, ())]
        for norm_type, foreach, some in itertools.product((2.0, 1.0, math.inf), (True, False), (homes, homes[:1])):
            weights, _ = self.weights(some, math.nan)
            with self.assertRaisesRegex(RuntimeError, "is non-finite"):
                nn.utils.clip_grad_norm_(weights, 1.0, norm_type, error_if_nonfinite=True, foreach=foreach)

    def test_a_norm_from_one_mesh_scales_gradients_elsewhere(self):
        """As a trainer clips that adds up norms by itself."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        weights, wholes = self.weights([(mesh, (Shard(0), Shard(1))), (mesh["dp"], (Shard(0),)), (None, ())])
        norm = get_total_norm([weight.grad for weight in weights[: len(WHOLES)]])
        for some in (weights, weights[-1]):
            clip_grad._clip_grads_with_norm_(some, 1.0, norm)
        for number, (weight, whole) in enumerate(zip(weights, wholes)):
            found = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
            twice = 2 if number == len(weights) - 1 else 1
            self.assertEqual(found, whole / norm.full_tensor() ** twice, rtol=1e-5, atol=1e-7)

    def test_compiled_code_clips_alike(self):
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        weights, wholes = self.weights([(mesh, (Shard(0), Shard(1))), (None, ())])
        torch._dynamo.reset()
        norm = torch.compile(get_total_norm, backend="eager", fullgraph=True)([weight.grad for weight in weights])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.assertEqual(norm, get_total_norm(wholes), rtol=1e-5, atol=0)
