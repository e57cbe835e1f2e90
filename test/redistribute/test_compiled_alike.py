"""Compiled code runs the same collectives on all ranks, forward and backward, also where a rank has nothing.

A compiler drops a collective that nothing depends on, and puts one that depends on nothing into both graphs: the other
ranks then wait for this one. Each rank is compiled in turn, on the fake backend, and its graphs are compared.
"""

import contextlib
import itertools

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mesh_harness import fake_world
from twins_tensor import rows
from way import as_beside_gloo, needs_overlay
from width import sample

pytestmark = needs_overlay
PARTITIONS = [default_partition, min_cut_rematerialization_partition]
PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
CASES = [
    ((2,), shape, words)
    for shape in ((1, 4), (2, 1))
    for words in itertools.permutations(PLACEMENTS, 2)
    if words[1] != "P"
]
CASES += [((4,), (9, 2), ("S0", "S1")), ((4,), (9, 2), ("S1", "S0")), ((4,), (2, 3), ("P", "S0"))]
CASES += [((2, 2), (1, 3), case) for case in (("P S0", "S0 R"), ("S0 S0", "S1 R"), ("S0 P", "R S1"), ("R P", "S0 S0"))]


def _local(placements, shape, sizes, mesh):
    cuts = [("S", p.dim) if isinstance(p, Shard) else ("R",) for p in placements]
    mine = rows(cuts, shape, sizes, tuple(mesh.get_coordinate()))
    return torch.ones([len(indices) for indices in mine], requires_grad=True)


def _graphs(rank, sizes, shape, words, partition):
    """The collectives of each graph of this rank."""
    source, target = ([PLACEMENTS[word] for word in side.split()] for side in words)
    with fake_world(rank, torch.Size(sizes).numel()):
        mesh = init_device_mesh("cpu", sizes)
        local = _local(source, shape, sizes, mesh)

        def moved(local):
            placed = DTensor.from_local(
                local, mesh, source, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
            return placed.redistribute(placements=target).to_local().sin().sum() + local.sin().sum()

        found = []

        def cut(*arguments, **options):
            graphs = partition(*arguments, **options)
            for graph in graphs:
                names = [str(node.target) for node in graph.graph.nodes]
                found.append([name for name in names if "_c10d_functional" in name and "wait_tensor" not in name])
            return graphs

        backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=cut,
            decompositions=select_decomp_table(),
        )
        torch._dynamo.reset()
        with contextlib.suppress(RuntimeError):  # the fake group may refuse an empty input
            torch.compile(moved, backend=backend, fullgraph=True)(local)
        return found


@pytest.mark.parametrize("partition, case", list(sample(itertools.product(PARTITIONS, CASES), 5)))
def test_every_rank_has_the_same_collectives(partition, case, monkeypatch):
    sizes, shape, words = case
    # Only the fake group of some releases needs an element where a rank sends nothing.
    as_beside_gloo(monkeypatch)

    found = [_graphs(rank, sizes, shape, words, partition) for rank in range(torch.Size(sizes).numel())]
    assert all(graphs == found[0] for graphs in found), found
    assert len(found[0]) == 2 and any(found[0]), found
