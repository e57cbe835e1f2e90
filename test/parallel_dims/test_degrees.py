"""What ParallelDims says about degrees that can't be, and ParallelMeshes about axes that aren't there."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dims_twin import RECIPE, overlay
from mesh_harness import fake_world
from torch_overlay.parallel_dims import ParallelDims

WRONG = [
    (dict(pp=2, dp_shard=4, tp=2), 64, "must be the world size (64); got 2 * 1 * 4 * 1 * 2 = 16. Would fit: pp=8; dp_"),
    (
        dict(pp=3, dp_shard=5),
        64,
        "must be the world size (64); got 3 * 1 * 5 * 1 * 1 = 15. No change of one degree would",
    ),
    (
        dict(tp=5, cp=2),
        24,
        "must divide the world size (24), so that dp_shard=-1 has a value; got 1 * 1 * 2 * 5 = 10. ",
    ),
    (dict(dp_shard=4, tp=2, ep=3), 8, "ep * etp must divide dp_shard * cp * tp (8); got 3 * 1 = 3. Would fit: ep out"),
    (dict(), -1, "fit() needs the number of ranks, from 1 on; got -1"),
    (dict(dp_shard=4, tp=2, ep=-1, etp=3), 8, "etp must divide dp_shard * cp * tp (8), so that ep=-1 has a value; got"),
]


def refused(degrees: dict[str, int], world_size: int) -> str:
    """What fit() says of these degrees, or nothing."""
    try:
        ParallelDims(**degrees).fit(world_size)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("degrees, world_size, message", WRONG)
def test_degrees_that_do_not_fit(degrees, world_size, message):
    assert message in refused(degrees, world_size)


@pytest.mark.parametrize("world_size", [8, 24])
def test_what_the_message_says_would_fit_fits(world_size):
    """Every value that it names, tried."""
    advised = 0
    for tp, cp, dp_shard, ep in itertools.product((1, 2, 3, 5, 16), (1, 2), (-1, 1, 4), (1, 2, 3, 8)):
        degrees = dict(tp=tp, cp=cp, dp_shard=dp_shard, ep=ep)
        for advice in filter(None, refused(degrees, world_size).partition("Would fit: ")[2].split("; ")):
            name, _, values = advice.replace("=", " out of ").partition(" out of ")
            for value in values.split(", "):
                problem = refused(degrees | {name: int(value)}, world_size)
                assert not problem or (problem.startswith("ep * etp") and name not in ("ep", "etp")), (degrees, advice)
                advised += 1
    assert advised > 100


@pytest.mark.parametrize("degree", [0, -2, 2.0, True, "2", None])
def test_degrees_that_cannot_be(degree):
    with pytest.raises(ValueError, match=f"tp must be a number of ranks from 1 on, or -1 .* got {degree!r}"):
        ParallelDims(tp=degree)


def test_only_one_degree_is_left_open():
    with pytest.raises(
        ValueError, match="only one degree can be -1, got dp_shard and tp; dp_shard is -1 unless you give"
    ):
        ParallelDims(tp=-1)
    with pytest.raises(ValueError, match=r"only one degree can be -1, got pp and ep$"):
        ParallelDims(dp_shard=2, pp=-1, ep=-1)


def test_sizes_need_every_degree():
    with pytest.raises(ValueError, match=r"call fit\(world_size\) first"):
        ParallelDims().sizes()
    assert RECIPE.sizes()["efsdp"] == 2


def test_build_needs_a_job():
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        ParallelDims().build("cpu")


@pytest.fixture(params=[True, False], ids=["overlay", "stock"])
def dims(request):
    """The recipe's meshes as rank 37 of 64 sees them."""
    with overlay(request.param), fake_world(37, 64):
        yield RECIPE.build("cpu")


AXES = "the axes are world, pp, dp_replicate, fsdp, tp, efsdp, ep, etp, batch, cp, loss"


def test_axes_by_name(dims):
    assert dims["dp_replicate", "fsdp"] == dims.dense["dp_replicate", "fsdp"]
    assert dims["batch", "cp"] == dims.data["batch", "cp"]
    assert dims["tp"] is dims["tp"] and dims["loss"] == dims.loss
    assert dims["pp", "dp_replicate", "efsdp", "ep", "etp"] is dims.sparse
    assert dims.enabled == ("world", "pp", "dp_replicate", "fsdp", "tp", "efsdp", "ep", "batch", "cp", "loss")
    assert dims["etp"].size() == 1 and dims["etp"].mesh.tolist() == [37] and dims["etp"].get_group().size() == 1


def test_axes_that_are_not_there(dims):
    with pytest.raises(KeyError, match=f"no axis 'dp_shard'; {AXES}"):
        dims["dp_shard"]
    with pytest.raises(KeyError, match=f"no axis 'x', 'y'; {AXES}"):
        dims["x", "tp", "y"]
    with pytest.raises(KeyError, match=f"no axis asked for; {AXES}"):
        dims[()]
    with pytest.raises(
        KeyError, match="no mesh has the axes fsdp, ep together: world has world; dense has pp, dp_repl"
    ):
        dims["fsdp", "ep"]
    with pytest.raises(
        KeyError, match=r"in the order of their mesh, each once: \('fsdp', 'tp'\), got \('tp', 'fsdp'\)"
    ):
        dims["tp", "fsdp"]
    with pytest.raises(KeyError, match="each once"):
        dims["tp", "tp"]


def test_of_leads_back_to_the_mesh(dims):
    """By name, by several names, by what was joined; shared names go where their company is."""
    assert dims.of(dims["fsdp"]) is dims.of(dims["tp"]) is dims.of(dims["dp_replicate", "fsdp"]) is dims.dense
    assert dims.of(dims["ep"]) is dims.of(dims["dp_replicate"], dims["efsdp"]) is dims.sparse
    assert dims.of(dims["pp"], dims["ep"]) is dims.sparse
    assert dims.of(dims["cp"]) is dims.of(dims["batch", "cp"]) is dims.of(dims.loss) is dims.data
    assert dims.of(dims.loss, dims["tp"]) is dims.data
    assert dims.of(dims.dense) is dims.dense and dims.of(dims.sparse) is dims.sparse
    assert dims.of(dims.world) is dims.world
    assert dims.of(dims["dp_replicate", "fsdp"]._flatten("hsdp")) is dims.dense
    region = dims["efsdp", "ep"]._flatten("region")  # the ranks of fsdp and tp, joined; its company tells
    assert dims.of(region) is dims.dense and dims.of(region, dims["etp"]) is dims.sparse
    assert dims.of(dims["batch", "tp"]._flatten("both"), dims["cp"]) is dims.data
    shared = DeviceMesh._concatenate([dims["fsdp"], dims["tp"]])  # what FSDP2 makes of its mesh and tensor parallel's
    assert dims.of(shared) is dims.dense


def test_of_refuses_what_came_from_elsewhere(dims):
    for others in (
        (dims["fsdp"], dims["ep"]),
        (),
        (init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))["b"],),
    ):
        with pytest.raises(ValueError, match=r"views of one mesh of these dims \(world, dense, sparse, data, loss\)"):
            dims.of(*others)
    with pytest.raises(ValueError, match="needs meshes with names"):
        dims.of(DeviceMesh("cpu", torch.arange(64)))
