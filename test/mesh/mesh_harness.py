"""What the mesh tests share: a world of one process, the overlay around a test, and counting.

What the overlay is for a test depends on the way in which the suite runs: see way.py. Tests that state what stock does
must pass on stock too, so that what we call stock's behaviour is stock's.
"""

from __future__ import annotations

import contextlib
import warnings

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from on_device import DEVICE
from way import STOCK
from way import needs_overlay as needs_overlay
from way import overlay as overlay


@contextlib.contextmanager
def fake_world(rank: int = 0, size: int = 8, **how):
    """A world of ``size`` ranks of which this process plays one; its collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size, **how)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_root(ranks, sizes, names) -> DeviceMesh:
    """A root mesh, by ``init_device_mesh`` where the rank map is the identity over the world."""
    if list(ranks) == list(range(dist.get_world_size())):
        return init_device_mesh(DEVICE, tuple(sizes), mesh_dim_names=tuple(names))
    return DeviceMesh(DEVICE, nested(ranks, sizes), mesh_dim_names=tuple(names))


def nested(ranks, sizes):
    """Ranks as nested lists of these sizes, row-major."""
    ranks = list(ranks)
    for size in reversed(sizes[1:]):
        ranks = [ranks[i : i + size] for i in range(0, len(ranks), size)]
    return ranks


def group_ranks(mesh: DeviceMesh, axis) -> tuple[int, ...]:
    """The ranks of the mesh's group on one axis, in group order."""
    return tuple(dist.get_process_group_ranks(mesh.get_group(axis)))


def joint_group(mesh: DeviceMesh, axes):
    """This rank's group over some axes of the mesh, as a redistribution finds it."""
    from torch_overlay.distributed.tensor._runner.at_hand import Site, at_hand

    return at_hand(mesh, Site.of(mesh)).find(mesh, axes)


def open_groups() -> list:
    """Every group that this process has open now, the world's included."""
    return list(distributed_c10d._world.pg_map)


@contextlib.contextmanager
def counted_groups():
    """The ranks of every group that torch is asked for, whoever asks: all ways lead through one function."""
    asked, create = [], distributed_c10d._new_group_with_tag

    def counting(ranks=None, *arguments, **named):
        asked.append(tuple(map(int, ranks)))  # before 2.12 they come as a class of ours
        return create(ranks, *arguments, **named)

    distributed_c10d._new_group_with_tag = counting
    try:
        yield asked
    finally:
        distributed_c10d._new_group_with_tag = create


@contextlib.contextmanager
def quiet():
    """Without the warnings that stock gives for by-name access to flattened meshes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def permuted(mesh: DeviceMesh, names) -> DeviceMesh:
    """The mesh with its axes in another order; stock gets there by concatenating slices, as FSDP2 does."""
    if STOCK:
        return DeviceMesh._concatenate([mesh[name] for name in names])
    return mesh.permute(names)
