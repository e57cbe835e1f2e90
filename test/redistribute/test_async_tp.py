"""Inductor's async tensor parallelism finds what it finds on stock: matmuls with the collectives before or after them.

Its pass only rewrites a graph, so it runs here on the CPU, once two questions about the machine are answered with yes.
"""

from collections import Counter
from copy import deepcopy
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mesh_harness import fake_world


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def rewritten(graph_module: torch.fx.GraphModule) -> Counter:
    """How many matmuls async tensor parallelism would fuse in a graph, and what collectives it would leave."""
    graph = deepcopy(graph_module)
    remove_noop_ops(graph.graph)
    view_to_reshape(graph)
    with (
        mock.patch("torch.distributed.is_nccl_available", lambda: True),
        mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", lambda name: True),
    ):
        micro_pipeline_tp_pass(graph.graph)
    names = [str(node.target).split(".") for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(name[1] for name in names if len(name) == 3 and name[0] in ("symm_mem", "_c10d_functional"))


def trained(mesh, dim: int, ndim: int) -> list[Counter]:
    """What is fused in a step of a sequence-parallel MLP, forward and backward; activations are sharded on `dim`."""
    found = []

    def look(graph_module, inputs):
        found.append(rewritten(graph_module))
        return graph_module

    torch._dynamo.reset()
    plan = {"up": ColwiseParallel(input_layouts=Shard(dim)), "down": RowwiseParallel(output_layouts=Shard(dim))}
    model = parallelize_module(MLP().to(mesh.device_type), mesh, plan)
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, decompositions=select_decomp_table())
    x = torch.rand((4, 8, 16)[3 - ndim :], device=mesh.device_type, requires_grad=True)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    return found


@pytest.fixture(params=["whole", "slice"])
def mesh(request):
    with fake_world(3, 8):
        if request.param == "whole":
            yield init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        else:
            yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
    torch._dynamo.reset()


# The same runs on stock torch, with TORCH_OVERLAY_TEST=stock.
@pytest.mark.parametrize(("dim", "ndim"), [(0, 2), (0, 3), (1, 3)])
def test_matmuls_are_fused_with_collectives_as_on_stock(mesh, dim, ndim):
    forward, backward = trained(mesh, dim, ndim)
    assert forward == backward == {"fused_all_gather_matmul": 1, "fused_matmul_reduce_scatter": 1}
