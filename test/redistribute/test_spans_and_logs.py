"""Spans in the profiler, where people look when something is slow or stuck."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from mesh_harness import fake_world
from way import needs_overlay

pytestmark = needs_overlay
R, S, P = Replicate(), Shard, Partial()
PREFIX = "torch_overlay::"


@pytest.fixture
def mesh():
    """Rank 3 of a 2 x 4 mesh whose joint group is at hand."""
    with fake_world(3, 8):
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def placed(mesh, *placements, local=None):
    return DTensor.from_local(torch.ones(8, 8) if local is None else local, mesh, placements, run_check=False)


def spans(act) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        act()
    return [event.name.removeprefix(PREFIX) for event in seen.events() if event.name.startswith(PREFIX)]


@pytest.mark.parametrize("gradient", [False, True])
def test_a_planned_redistribution_has_a_span(mesh, gradient):
    given = placed(mesh, P, S(0)).requires_grad_(gradient)
    given.redistribute(placements=(R, S(0)))
    wanted = f"redistribute {P},S(0)->R,S(0)"
    assert spans(lambda: given.redistribute(placements=(R, S(0)))) == [wanted]
    assert spans(lambda: None) == []


def test_a_span_ends_with_an_error(mesh):
    from torch_overlay.distributed import _torch

    def fails(local):
        raise RuntimeError("as a collective may")

    def act():
        with pytest.raises(RuntimeError, match="as a collective may"):
            _torch.spanned(lambda: "first", [fails])[0](torch.ones(1))
        with _torch.span("second"):
            pass

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        act()
    events = {event.name: event for event in seen.events() if event.name.startswith(PREFIX)}
    assert events[f"{PREFIX}second"].cpu_parent is None


@pytest.mark.parametrize("compiled", [False, True])
def test_no_span_in_a_graph(mesh, compiled):
    """A tracer would take it for a part of the program; compiled code has its collectives and no plan any more."""
    codes = []

    def keep(graph, _):
        codes.append(graph.code)
        return graph

    def moves(local):
        return placed(mesh, S(0), S(1), local=local).redistribute(placements=(R, R)).to_local() * 2

    def act():
        if compiled:
            torch.compile(moves, backend=aot_autograd(fw_compiler=keep))(torch.ones(8, 8))
        else:
            keep(make_fx(moves)(torch.ones(8, 8)), None)

    assert spans(act) == []
    assert "all_gather_into_tensor" in codes[0]
    assert "profiler" not in codes[0]
    torch._dynamo.reset()
