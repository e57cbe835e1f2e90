"""What a collective is assumed to cost, by the type of device."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay


@pytest.fixture
def mesh():
    with torch_overlay.enabled():
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        yield dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        dist.destroy_process_group()


def test_constants_are_those_of_the_type_of_device(mesh, monkeypatch):
    """Two meshes that differ in it have plans of their own; of a device without a row the CPU's hold."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    from torch_overlay.distributed.tensor._planner import cost as planner_cost
    from torch_overlay.distributed.tensor._runner import exchange

    rounds = planner_cost.Cost(round_bytes=1, latency=1e-9)
    monkeypatch.setattr(planner_cost, "_ASSUMED", {"cpu": planner_cost.Cost(), "meta": rounds})
    assert planner_cost.Cost.of("meta") == rounds and planner_cost.Cost.of("xpu") == planner_cost.Cost()
    counts = {}
    for device in ("cpu", "meta"):
        on = dist.device_mesh.init_device_mesh(device, (2, 4), mesh_dim_names=("a", "b"))
        local = torch.ones(64, 64, device=device)
        tensor = DTensor.from_local(local, on, (Shard(0), Shard(0)), run_check=False)
        with CommDebugMode() as mode:
            tensor.redistribute(placements=(Shard(1), Replicate()))
        counts[device] = mode.get_total_counts()
    assert counts["cpu"] == 1 < counts["meta"]
    monkeypatch.setattr(exchange, "LARGE_BYTES", {"cpu": 1 << 20, "meta": 64})
    assert exchange.is_large(torch.ones(16, device="meta"), 16) and not exchange.is_large(torch.ones(16), 16)
