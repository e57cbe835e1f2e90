"""``options.cost``: sharding propagation hears torch's estimate, or that of the plan that will run."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_overlay

PAIRS = [
    ((Shard(0), Shard(0)), (Replicate(), Replicate())),
    ((Partial(), Partial()), (Replicate(), Replicate())),
    ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
    ((Partial(), Shard(0)), (Shard(0), Replicate())),
    ((Replicate(), Replicate()), (Shard(0), Shard(0))),
]


@pytest.fixture
def mesh():
    with torch_overlay.enabled():
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        yield dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        dist.destroy_process_group()


def spec(mesh, placements):
    shape = torch.Size((64, 64))
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, (64, 1), torch.float32))


def cost(mesh, pair):
    from torch.distributed.tensor._collective_utils import redistribute_cost

    return redistribute_cost(*(spec(mesh, placements) for placements in pair))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_stock_unless_asked(mesh, pair):
    ours = cost(mesh, pair)
    torch_overlay.disable()
    assert cost(mesh, pair) == ours
    torch_overlay.enable()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_cost_is_that_of_the_plan_that_runs(mesh, pair):
    torch_overlay.enable(cost="plan")
    from torch_overlay.distributed.tensor._plans.program import make_program
    from torch_overlay.distributed.tensor._plans.question import Question

    source, target = (spec(mesh, placements) for placements in pair)
    planned = make_program(Question.of(mesh, source, target, source.shape, torch.float32), mesh)
    assert cost(mesh, pair) == pytest.approx(1e6 * sum(planned.cost.seconds(step, 4) for step in planned.steps))
    assert (cost(mesh, pair) == 0) == (pair == PAIRS[-1])  # narrowing is free, all else isn't


def test_a_partial_of_another_class_has_torchs_cost(mesh):
    """It calls itself equal to torch's, whose cost is remembered; but no plan will run it."""

    class Doubled(Partial):
        pass

    whole, stock = (Replicate(), Replicate()), cost(mesh, (((Doubled(), Partial())), (Replicate(), Replicate())))
    torch_overlay.enable(cost="plan")
    planned = cost(mesh, ((Partial(), Partial()), whole))
    assert planned != stock and Doubled() == Partial()
    assert cost(mesh, ((Doubled(), Partial()), whole)) == stock
    assert cost(mesh, ((Partial(), Partial()), whole)) == planned


def test_a_slower_axis_costs_more(mesh):
    torch_overlay.enable(cost="plan")
    even = cost(mesh, PAIRS[0])
    torch_overlay.enable(topology=(("a", 1e6, 1e-3),))
    assert cost(mesh, PAIRS[0]) > 10 * even


def test_a_strided_shard_is_no_cheap_way_to_terms_either(mesh):
    """Its plan moves nothing; sharding propagation must not choose it for that, as with a plain shard. Torch's price
    stays, which is none except on 2.10, where its steps gather the strided shard."""
    pairs = [((shard, Shard(0)), (Partial(), Shard(0))) for shard in (Shard(0), _StridedShard(0, split_factor=4))]
    prices = [cost(mesh, pair) for pair in pairs]
    torch_overlay.enable(cost="plan")
    assert prices[0] == float("inf") and 0 < prices[1] == cost(mesh, pairs[1]) and cost(mesh, pairs[0]) == prices[0]


def test_constants_are_those_of_the_type_of_device(mesh, monkeypatch):
    """Two meshes that differ in it have plans of their own; of a device without a row the CPU's hold."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    from torch_overlay.distributed.tensor._planner import cost as planner_cost
    from torch_overlay.distributed.tensor._plans import packing

    rounds = planner_cost.Cost(round_bytes=1, latency=1e-9)
    monkeypatch.setattr(planner_cost, "_ASSUMED", {"cpu": planner_cost.Cost(), "meta": rounds})
    known = planner_cost.Cost.of(("a", "b"), [("a", 1e9, 1e-6)], "meta")
    assert (known.axes, known.round_bytes) == (((1e9, 1e-6), (rounds.bandwidth, 1e-9)), 1)
    assert planner_cost.Cost.of(None, None, "xpu") == planner_cost.Cost()
    counts = {}
    for device in ("cpu", "meta"):
        on = dist.device_mesh.init_device_mesh(device, (2, 4), mesh_dim_names=("a", "b"))
        local = torch.ones(64, 64, device=device)
        tensor = DTensor.from_local(local, on, (Shard(0), Shard(0)), run_check=False)
        with CommDebugMode() as mode:
            tensor.redistribute(placements=(Shard(1), Replicate()))
        counts[device] = mode.get_total_counts()
    assert counts["cpu"] == 1 < counts["meta"]
    monkeypatch.setattr(packing, "LARGE", {"cpu": 1 << 20, "meta": 64})
    assert packing.is_large(torch.ones(16, device="meta"), 16) and not packing.is_large(torch.ones(16), 16)
