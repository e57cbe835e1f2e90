"""Redistribution over a backend that somebody wrote in Python, and that has no all_to_all."""

import itertools
import warnings

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mesh_ranks import WORLD
from on_device import DEVICE
from twins_ranks import Case, MeshRecipe
from way import needs_package
from width import sample


class Few(dist.ProcessGroup):
    """What it has it hands on to gloo."""

    def __init__(self, rank, size, gloo):
        super().__init__(rank, size)
        self.gloo = gloo

    def getBackendName(self):
        return "few"

    @property
    def group_name(self):
        return distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors, options):
        return self.gloo.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        return self.gloo.broadcast(tensors, options)

    def allgather(self, outputs, inputs, options):
        return self.gloo.allgather(outputs, inputs, options)

    def allgather_into_tensor_coalesced(self, outputs, inputs, options=None):
        (output,), (given,) = outputs, inputs
        return self.gloo.allgather([list(output.view(self.size(), *given.shape).unbind())], [given])

    def scatter(self, outputs, inputs, options):
        return self.gloo.scatter(outputs, inputs, options)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, options):
        (output,), (given,) = outputs, inputs
        reduced, how = given.clone(), dist.AllreduceOptions()
        how.reduceOp = options.reduceOp
        work = self.gloo.allreduce([reduced], how)
        work.wait()
        output.copy_(reduced.view(self.size(), *output.shape)[self.rank()])
        return work


def few(store, rank, size, timeout):
    return Few(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


class BackendCases:
    """Cases for ``EightRanks``."""

    @needs_package  # which counts
    def test_what_a_backend_has_is_planned(self):
        from torch_overlay.report import redistributions

        mesh, before = self.few_mesh(), redistributions()
        placed = distribute_tensor(torch.arange(24.0).reshape(8, 3), mesh, (Shard(0), Shard(0)), src_data_rank=None)
        self.assertEqual(placed.full_tensor().flatten().tolist(), list(range(24)))
        after, planned = redistributions(), "redistributions by plan"
        self.assertEqual(after[planned], before[planned] + 1)
        placed.redistribute(placements=(Shard(0), Shard(1)))
        self.assertEqual(redistributions()[planned], after[planned])

    def few_mesh(self):
        if not hasattr(dist.Backend, "FEW"):
            dist.Backend.register_backend("few", few, devices=["cpu"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by = {"a": "few", "b": "few"}
            return init_device_mesh(DEVICE, (2, WORLD // 2), mesh_dim_names=("a", "b"), backend_override=by)

    def test_a_backend_without_all_to_all(self):
        """Where a plan would need one, torch's own steps run, as on stock; what else they run is planned."""
        mesh = self.few_mesh()
        recipe = MeshRecipe(tuple(range(WORLD)), (2, WORLD // 2))
        kinds = (("R",), ("S", 0), ("S", 1), ("P", "sum"))
        sources = itertools.product(kinds, repeat=2)
        targets = list(itertools.product(kinds[:3], repeat=2))
        ends = itertools.product(sources, targets, ((8, 16), (5, 3)))
        for source, target, shape in sample(ends, 11):
            case = Case(recipe, source, target, shape)
            problem = case.problem(mesh, self.rank)
            self.assertIsNone(problem, f"{case!r}: {problem}")
