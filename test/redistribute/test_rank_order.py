"""Meshes whose groups have their ranks in another order than the mesh: torch scatters a tensor in the order of the
group, and cuts it in that of the mesh, so data would come back permuted. They are refused, on all ranks alike."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_harness import fake_world, needs_overlay
from torch_overlay import versions
from torch_overlay.transfers.sharding import Meshes, shardings
from way import needs_package

pytestmark = [needs_overlay, needs_package]
R, S = Replicate(), Shard


@pytest.fixture(autouse=True)
def overlay_on():
    """In place of the one for all tests here: each turns it on itself."""


def uses(mesh):
    """What reads or makes shards of a DTensor on this mesh."""
    held = DTensor.from_local(torch.ones(4, 4), mesh, [S(0)] * mesh.ndim, run_check=False)
    return (
        lambda: distribute_tensor(torch.ones(8, 8), mesh, [S(0)] * mesh.ndim),
        lambda: held.full_tensor(),
        lambda: held.redistribute(placements=[S(1)] * mesh.ndim),
        lambda: shardings({"weight": held}, Meshes()),  # for a Transfer
    )


def refused(mesh, match):
    for use in uses(mesh):
        with pytest.raises(RuntimeError, match=match):
            use()


@pytest.mark.parametrize("ranks", [[1, 0, 2, 3], [[0, 1], [3, 2]], [[2, 3], [0, 1]]])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_mesh_from_before_enable_whose_ranks_do_not_ascend(ranks, rank):
    """Torch sorts the ranks of its groups. On all ranks, or rank 0 of [[0, 1], [3, 2]], whose own groups are in order,
    would wait for the others."""
    with fake_world(rank, 4):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")[: torch.tensor(ranks).ndim])
        with torch_overlay.enabled():
            refused(mesh, "Make the mesh after torch_overlay.enable")
            for use in uses(DeviceMesh("cpu", ranks)):  # equal, and made by the overlay
                use()


def test_meshes_from_before_enable_in_order_are_used():
    """Also one that the overlay itself made, in an order of its own, before it was turned off."""
    with fake_world(1, 4):
        with torch_overlay.enabled():
            ours = DeviceMesh("cpu", [[1, 0], [3, 2]])
        plain = init_device_mesh("cpu", (2, 2))
        with torch_overlay.enabled():
            for use in (*uses(plain), *uses(ours)):
                use()


@pytest.mark.skipif(versions.running().number < (2, 12), reason="up to 2.11 torch sorts the ranks of each group")
@pytest.mark.parametrize("in_order", [True, False])
def test_groups_that_the_user_made(in_order):
    with fake_world(1, 4):
        rows, columns = [[3, 2], [1, 0]], [[3, 1], [2, 0]]
        groups = [
            next(group for group in made if dist.get_rank(group) >= 0)
            for made in ([dist.new_group(r, sort_ranks=not in_order) for r in sets] for sets in (columns, rows))
        ]
        with torch_overlay.enabled():
            mesh = DeviceMesh.from_group(groups, "cpu", mesh=rows, mesh_dim_names=("a", "b"))
            if not in_order:
                refused(mesh, "sort_ranks=False")
                return
            for use in uses(mesh):
                use()
