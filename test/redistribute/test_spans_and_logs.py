"""What people look at when something is slow or stuck: the profiler, the logs, the trace that tlparse reads."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from mesh_harness import fake_world, joint_group
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


def test_collectives_lie_in_the_span(mesh):
    given = placed(mesh, S(0), S(1))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        given.redistribute(placements=(R, R))
    (span,) = [event for event in seen.events() if event.name.startswith(PREFIX)]
    inside = [child.name for child in span.cpu_children]
    assert "_c10d_functional::all_gather_into_tensor" in inside


def test_a_span_ends_with_an_error(mesh):
    from torch_overlay.distributed import _torch

    def fails(local):
        raise RuntimeError("as a collective may")

    def act():
        with pytest.raises(RuntimeError, match="as a collective may"):
            _torch.spanned("first", [fails])[0](torch.ones(1))
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


def logged(caplog, act) -> list[str]:
    with caplog.at_level(logging.DEBUG, logger="torch_overlay"):
        caplog.clear()
        act()
        return [record.getMessage() for record in caplog.records if record.name.startswith("torch_overlay")]


def test_each_plan_and_each_group_is_logged_once(caplog):
    with fake_world(3, 8):
        made = []
        groups = logged(caplog, lambda: made.append(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))))
        said = [line.partition(", the process group ")[0::2] for line in groups]
        assert [name for name, _ in said] == ["made mesh_dp", "made mesh_tp", "made mesh_dp_tp"]
        assert [rest.rpartition(" of ")[2] for _, rest in said] == ["ranks 3, 7", "ranks 0-3", "ranks 0-7"]
        given = placed(made[0], P, S(0))
        (plan,) = logged(caplog, lambda: given.redistribute(placements=(R, R)))
        assert plan.startswith(f"planned {P},S(0)->R,R of float32 (32, 8) on (dp=2, tp=4): ")
        assert plan.endswith("B")
        assert logged(caplog, lambda: given.redistribute(placements=(R, R))) == []


@pytest.mark.parametrize("names", [("dp", "tp"), ()])
def test_groups_are_described_as_on_stock(names):
    with fake_world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names or None)
        found = [mesh.get_group(axis).group_desc for axis in range(2)]
    assert found == [f"mesh_{name}" for name in names or ("dim_0", "dim_1")]


def test_a_joint_group_is_described_as_a_flattened_one(mesh):
    from torch_overlay.distributed._groups.table import find_group

    assert find_group(joint_group(mesh, (0, 1)).name).group_desc == "mesh_dp_tp"


PROGRAM = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import torch_overlay
torch_overlay.enable()
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
given = DTensor.from_local(torch.ones(8, 8), mesh, (Shard(0), Shard(1)), run_check=False)
given.redistribute(placements=(Replicate(), Replicate()))
"""


def run(**environment) -> str:
    """What the program above says on its standard error."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**found, **environment})
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_silent_by_default(caplog):
    with fake_world(3, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        placed(mesh, P, S(0)).redistribute(placements=(R, R))
    assert not [record for record in caplog.records if record.name.startswith("torch_overlay")]


def test_torch_logs_and_torch_trace_say_it(tmp_path):
    said = run(TORCH_LOGS="+torch_overlay", TORCH_TRACE=str(tmp_path))
    assert said.count("] planned S(0),S(1)->R,R of float32 (16, 32)") == 1
    assert said.count("] made mesh_") == 3
    (trace,) = tmp_path.iterdir()
    lines = trace.read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if '"redistribution_plan"' in line]
    about = json.loads(lines[at].partition("] ")[2])
    assert about["artifact"] == {"name": "redistribution_plan", "encoding": "string"}
    assert about["rank"] == 3
    assert lines[at + 1].startswith("\tS(0),S(1)->R,R of float32 (16, 32) on (dp=2, tp=4): ")
