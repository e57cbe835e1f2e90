"""What compilers do beside plain `torch.compile`, around redistributions: whatever works on stock works under the
overlay, with the shapes of eager code, and the same graph breaks.

A world of one process whose collectives move nothing, as in test_redistribute_modes.py. Run it on stock
(``TORCH_OVERLAY_TEST=stock``) to see that each feature works there."""

import contextlib
import functools

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from mesh_harness import STOCK, fake_world, needs_overlay
from torch_overlay import versions
from torch_overlay.distributed._mesh.caches import forget_shardings

R, S, P = Replicate(), Shard, Partial()


@pytest.fixture
def mesh():
    """Rank 3 of a 2 x 4 mesh. Stock's caches of shardings would hand on the meshes of earlier tests."""
    torch._dynamo.reset()
    forget_shardings()
    with fake_world(3, 8):
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    torch._dynamo.reset()


def placed(mesh, local, placements):
    return DTensor.from_local(local, mesh, placements, run_check=False)


def moved(mesh, local):
    """An exchange and a reduction, as one local tensor of `local`'s shape."""
    swapped = placed(mesh, local, (S(0), S(1))).redistribute(placements=(S(1), S(0))).to_local()
    total = placed(mesh, local, (P, P)).redistribute(placements=(S(0), R)).to_local()
    return swapped.sum() + total.sum() + local


def leaf():
    return torch.ones(8, 8, requires_grad=True)


LACKS = versions.running().number < (2, 12)
MOVES = {
    "gather": ((S(0), S(1)), (R, R)),
    "swap": ((S(0), S(1)), (S(1), S(0))),
    "scatter": ((P, R), (S(0), R)),
    "cut": ((R, R), (S(0), S(1))),
}


class TestCompiledAutograd:
    """Dynamo traces backward, and in it the redistribution of the gradient: torch's own code breaks the graph there."""

    @pytest.mark.parametrize("move, nested", [("gather", False), ("swap", False), ("swap", True), ("scatter", False)])
    def test_backward_is_traced_around_it(self, mesh, move, nested):
        source, target = MOVES[move]
        local = leaf()
        given = placed(mesh, local, source).redistribute(placements=target)
        with torch._dynamo.config.patch(nested_graph_breaks=nested):
            with compiled_autograd._enable(torch.compile(backend="eager")):
                given.to_local().sum().backward()
        assert local.grad.shape == (8, 8)

    @needs_overlay  # stock fails where the exchange is along the outer axis of two
    def test_with_open_sizes(self, mesh):
        local = leaf()
        given = placed(mesh, local, (S(0), S(0))).redistribute(placements=(S(1), S(0)))
        with compiled_autograd._enable(torch.compile(backend="eager", dynamic=True)):
            given.to_local().sum().backward()
        assert local.grad.shape == (8, 8)

    @pytest.mark.parametrize("breaking", [False, True])
    def test_by_the_public_switch(self, mesh, breaking):
        def step(local):
            given = placed(mesh, local, (S(0), S(1))).redistribute(placements=(R, R))
            if breaking:
                torch._dynamo.graph_break()
            given.to_local().sum().backward()

        local = leaf()
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(step, backend="eager")(local)
        assert local.grad.shape == (8, 8)

    def test_in_other_types_and_pending(self, mesh):
        local = leaf()
        types = dict(forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
        given = placed(mesh, local, (S(0), S(1))).redistribute(placements=(S(1), S(0)), async_op=True, **types)
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            given.to_local().sum().backward()
        assert local.grad.shape == (8, 8)


@pytest.mark.parametrize("move, tangent", [("gather", (S(1), S(1))), ("scatter", (P, P))])
def test_tangents_may_have_other_placements(mesh, move, tangent):
    """Those of a compiled DTensor are redistributed to what was traced, outside of the graph."""
    source, target = MOVES[move]
    given = placed(mesh, torch.ones(8, 8), source).requires_grad_()
    fast = torch.compile(lambda given: given.redistribute(placements=target).sin(), backend="aot_eager")
    found = fast(given)
    local = torch.ones(found.shape) if P in tangent else torch.ones(len(found), found.shape[1] // 8)
    found.backward(placed(mesh, local, tangent))
    assert given.grad.shape == given.shape and given.grad.to_local().shape == (8, 8)


class Moved(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, local):
        return moved(self.mesh, local)


def test_export(mesh):
    """Of DTensors: `torch.export` takes no `from_local`."""

    class Doubled(torch.nn.Module):
        def forward(self, given):
            return given.redistribute(placements=(S(1), S(0))) * 2

    given = placed(mesh, torch.ones(8, 8), (S(0), S(1)))
    captured = dynamo_graph_capture_for_export(Doubled())(given)
    assert captured(given).to_local().shape == Doubled()(given).to_local().shape
    traced = make_fx(functools.partial(moved, mesh), tracing_mode="symbolic")(torch.ones(8, 8))
    assert traced(torch.ones(8, 8)).shape == (8, 8)


def test_joint_graph_of_a_sharded_weight(mesh):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(placed(mesh, torch.ones(8, 8), (S(0), S(1))))

        def forward(self, given):
            return self.weight.redistribute(placements=(R, R)) * given

    model = Scaled()
    given = placed(mesh, torch.ones(model.weight.shape), (R, R))
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, dynamo_graph_capture_for_export(model)(given), (given,))
    assert any("all_gather" in str(node.target) for node in joint.graph_module.graph.nodes)


def test_open_sizes(mesh):
    """As many graphs as on stock, for multiples of the mesh's sizes."""
    graphs = CompileCounterWithBackend("aot_eager")

    def swapped(given):
        return given.redistribute(placements=(S(1), S(0))) * 2

    fast = torch.compile(swapped, backend=graphs, dynamic=True, fullgraph=True)
    for rows in (8, 16, 24):
        given = placed(mesh, torch.ones(rows, 8), (S(0), S(1))).requires_grad_()
        found = fast(given)
        assert found.to_local().shape == swapped(given).to_local().shape
        found.to_local().sum().backward()
        assert given.grad.shape == given.shape
    assert graphs.frame_count <= 2


@pytest.mark.skipif(LACKS, reason="torch up to 2.11 compiles no DTensor there, on stock either")
@pytest.mark.parametrize("move", ["gather", "cut"])
def test_unbacked_sizes(mesh, move):
    source, target = MOVES[move]

    def run(local):
        return placed(mesh, local, source).redistribute(placements=target).to_local() * 2

    fast = torch.compile(run, backend="aot_eager", fullgraph=True)
    for rows in (8, 16):
        local = torch.ones(rows, 8)
        torch._dynamo.decorators.mark_unbacked(local, 0)
        assert fast(local).shape == run(torch.ones(rows, 8)).shape


@pytest.mark.parametrize("async_op", [False, True])
def test_graph_breaks_around_it(mesh, async_op):
    def run(given):
        given = given * 1
        torch._dynamo.graph_break()
        given = given.redistribute(placements=(S(1), S(0)), async_op=async_op)
        torch._dynamo.graph_break()
        return given * 2

    graphs = CompileCounterWithBackend("aot_eager")
    given = placed(mesh, torch.ones(8, 8), (S(0), S(1))).requires_grad_()
    torch.compile(run, backend=graphs)(given).sum().backward()
    assert given.grad.to_local().shape == (8, 8) and graphs.frame_count == 3


@pytest.mark.parametrize("region", ["nested_compile_region", "a module each", "checkpoint"])
def test_regions(mesh, region):
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    if region == "nested_compile_region":
        if LACKS:
            pytest.skip("torch up to 2.11 compiles no DTensor there, on stock either")

        @torch.compiler.nested_compile_region
        def layer(local):
            return moved(mesh, local)

        run = compiled(lambda local: layer(layer(local)))
    elif region == "a module each":
        run = torch.nn.Sequential(Moved(mesh), Moved(mesh))
        for layer in run:
            layer.compile(backend="aot_eager", fullgraph=True)
    else:
        run = compiled(lambda local: checkpoint(lambda local: moved(mesh, local).sin(), local, use_reentrant=False))
    local = leaf()
    if region == "nested_compile_region":  # its gradients take no autograd function like those of DTensor
        assert run(local.detach()).shape == (8, 8)
        return
    found = run(local)
    found.sum().backward()
    assert found.shape == local.grad.shape == (8, 8)


@pytest.mark.parametrize("source, target", [([S(0)], [S(1)]), ([P], [S(0)])])
def test_a_pending_result_goes_into_code_of_open_sizes(source, target):
    """Rank 1 of two: of 7 rows that are reduced it gets 3, a part of what comes."""
    torch._dynamo.reset()
    with fake_world(1, 2):
        line = init_device_mesh("cpu", (2,))
        fast = torch.compile(lambda given: given.to_local() * 2 + 1, backend="eager")
        for rows, columns in ((8, 4), (12, 4), (12, 6), (7, 3)):
            whole = torch.arange(float(rows * columns)).reshape(rows, columns)
            local = whole if source == [P] else whole.tensor_split([(rows + 1) // 2])[1]
            shape = dict(shape=whole.shape, stride=whole.stride())
            given = DTensor.from_local(local, line, source, run_check=False, **shape)
            found = given.redistribute(placements=target, async_op=True)
            assert STOCK or not found._local_tensor._is_view()
            assert torch.equal(fast(found), found.to_local() * 2 + 1)
    torch._dynamo.reset()
