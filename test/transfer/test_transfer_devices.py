"""What ranks tell one another lies where their tensors lie, whatever accelerator the host has."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_overlay
from mesh_harness import fake_world
from torch_overlay.transfers.route import Route
from way import needs_package

pytestmark = needs_package


def test_a_tree_of_cpu_tensors_asks_for_no_accelerator(monkeypatch):
    """A world of both, "cpu:gloo,cuda:nccl", isn't called gloo; its CPU tensors need no GPU, and the default device is
    the user's."""
    said = []
    real = dist.all_reduce
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: torch.device("meta"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *a, **b: said.append(tensor.device) or real(tensor, *a, **b))
    with fake_world(1, 4), torch_overlay.enabled():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        tree = {name: DTensor.from_local(torch.ones(64, 32), mesh, [Shard(0)]) for name in "ab"}
        with torch.device("meta"):
            torch_overlay.redistribute(tree, placements=Replicate(), budget=40_000)
    assert said == [torch.device("cpu")]


def test_a_transfer_asks_where_its_own_tensors_are():
    """On a host of several GPUs the current one may be another; a rank that has no tensor says no number."""
    route = object.__new__(Route)
    route.tensors = [SimpleNamespace(source=SimpleNamespace(device="cuda"))]
    route._sources, route._targets = [None], [SimpleNamespace(device=torch.device("cuda", 1))]
    assert route._device == torch.device("cuda", 1)
    route._targets = [None]
    assert route._device == torch.device("cuda")
