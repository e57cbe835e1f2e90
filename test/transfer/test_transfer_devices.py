"""What ranks tell one another lies where their tensors lie, whatever accelerator the host has."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_overlay
from mesh_harness import fake_world
from torch_overlay.transfers.groups import timeout_of
from torch_overlay.transfers.route import Route
from way import needs_package

pytestmark = needs_package


def test_a_tree_of_cpu_tensors_asks_for_no_accelerator(monkeypatch):
    """A world of both, "cpu:gloo,cuda:nccl", isn't called gloo; its CPU tensors need no GPU, and the default device is
    the user's."""
    said = []
    real = dist.all_gather
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: torch.device("meta"))
    monkeypatch.setattr(dist, "all_gather", lambda to, own, **how: said.append(own.device) or real(to, own, **how))
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


def test_the_timeout_is_that_of_the_devices_that_a_group_has(monkeypatch):
    """A group for GPUs alone is asked for these, and not for what the host has, or doesn't show yet."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: None)
    asked = []

    def backend(device):
        asked.append(device.type)
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))

    for kinds, first in ((["cuda"], "cuda"), (["cuda", "cpu"], "cpu")):
        group = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds], _get_backend=backend)
        assert timeout_of(group) == timedelta(seconds=7) and asked.pop() == first


@pytest.mark.parametrize(("budget", "waits"), [(1 << 20, 0), (20_000, 1)])
def test_the_host_waits_at_most_once_in_a_redistribution(monkeypatch, budget, waits):
    """On a GPU each value that the host reads waits for all that was launched. Where everything fits the budget ranks
    needn't ask one another; else they ask once for all, forward and backward, whatever is remembered, reduced before,
    or how many ranks answer."""
    said, reads = [], []
    for name in ("all_gather", "all_reduce"):

        def noted(to, *given, real=getattr(dist, name), **how):
            said.extend(each.untyped_storage().data_ptr() for each in (to if isinstance(to, list) else [to]))
            return real(to, *given, **how)

        monkeypatch.setattr(dist, name, noted)
    for name in ("tolist", "item", "__int__", "__bool__", "__float__", "__index__", "numpy", "cpu"):

        def read(self, *given, real=getattr(torch.Tensor, name), name=name):
            if self.untyped_storage().data_ptr() in said:
                reads.append(name)
            return real(self, *given)

        monkeypatch.setattr(torch.Tensor, name, read)

    def waited(what):
        said.clear(), reads.clear()
        found = what()
        assert len(reads) == waits, reads
        return found

    with fake_world(1, 4), torch_overlay.enabled():
        mesh, other = (
            init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)]) for sizes in ((4,), (2, 2))
        )
        local = torch.ones(64, 32, requires_grad=True)
        tree = [DTensor.from_local(local, mesh, [placement]) for placement in (Shard(0), Shard(0), Partial())]
        waited(lambda: torch_overlay.redistribute(tree[:2], placements=Replicate(), budget=budget))
        waited(lambda: torch_overlay.redistribute(tree, placements=[Shard(1)], budget=budget))
        for _ in range(2):
            found = waited(lambda: torch_overlay.redistribute(tree, other, [Replicate(), Shard(1)], budget=budget))
            waited(torch.stack([each.to_local().sum() for each in found]).sum().backward)
