"""What `status()` says of groups: who has which, who shares, what wider sharing or one more group would save."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_overlay
from mesh_harness import fake_world
from way import needs_package

pytestmark = needs_package


@pytest.fixture(autouse=True)
def world():
    with fake_world(1, 16):
        yield


def cube():
    return init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("dp", "cp", "tp"))


def listed():
    return str(torch_overlay.status().groups).splitlines()


def test_the_groups_of_a_mesh_are_listed():
    mesh = cube()
    mesh["cp"]._flatten("ring"), mesh["dp", "cp"]._flatten("dp_cp"), mesh._flatten("everybody")
    dist.destroy_process_group(mesh.get_group("tp"))
    assert listed() == [
        "mesh 1 over ranks 0-15",
        "  the default group serves everybody",
        "  axis dp: ranks 1, 9",
        "  axis cp: ranks 1, 5",
        "  axis tp: ranks 0-3, destroyed",
        "  redistributions over dp,cp,tp: ranks 0-15",
        "  axis ring: ranks 1, 5",
        "  axis dp_cp: ranks 1-13 by 4",
        '  share_groups="ranks" would save 1 communicator: cp with ring',
    ]
    assert "\ngroups\n  mesh 1 over ranks 0-15\n    the default group" in torch_overlay.status().all()


def test_without_a_world_there_is_nothing_to_list():
    dist.destroy_process_group()
    assert torch_overlay.status().groups is None and "\ngroups\n" not in torch_overlay.status().all()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    assert listed() == ["none"]


@pytest.mark.parametrize("named", [True, False])
def test_what_a_missing_group_cost_and_the_call_that_mends_it(named):
    """Three calls that gather over two of three axes take two collectives each where one would do."""
    mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("dp", "cp", "tp") if named else None)
    source = [Shard(0), Replicate(), Shard(0)]

    def gather(times):
        for _ in range(times):
            DTensor.from_local(torch.ones(3), mesh, source, run_check=False).full_tensor()

    gather(3)
    call = 'mesh["dp", "tp"].flatten("dp_tp")' if named else "a group over axes (0, 2) of a mesh without names"
    assert dict(torch_overlay.status().counts)["collectives that more groups would save"] == {call: 3}
    if named:
        eval(call, {"mesh": mesh})
        gather(5)
        assert dict(torch_overlay.status().counts)["collectives that more groups would save"] == {call: 3}
