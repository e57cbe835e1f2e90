"""What the mesh tests share: a world of one process, the overlay around a test, and counting.

What the overlay is for a test depends on the way in which the suite runs: see way.py. Tests that state what stock does
must pass on stock too, so that what we call stock's behaviour is stock's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
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
    from torch_overlay.distributed.tensor._plans.groups import Site, at_hand

    return at_hand(mesh, Site.of(mesh)).find(mesh, axes)


def open_groups() -> list:
    """Every group that this process has open now, the world's included."""
    return list(distributed_c10d._world.pg_map)


@dataclasses.dataclass
class Calls:
    """Group creations seen: the ranks asked for in each, in call order, and whether this rank was among them."""

    ranks: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ranks)

    def of(self, rank: int) -> list[tuple[int, ...]]:
        return [ranks for ranks in self.ranks if rank in ranks]


@contextlib.contextmanager
def counted_groups():
    """Counts the calls of ``new_group`` and the groups of ``split_group``, whoever makes them."""
    calls, undo = Calls(), []

    def count(name, seen):
        original = getattr(distributed_c10d, name)

        def counting(*args, **kwargs):
            calls.ranks.extend(seen(*args, **kwargs))
            return original(*args, **kwargs)

        homes = [distributed_c10d, dist, device_mesh, *overlay_rooms()]
        for home in homes:
            if vars(home).get(name) is original:
                undo.append((home, name, original))
                setattr(home, name, counting)

    count("new_group", lambda ranks=None, *a, **k: [tuple(map(int, ranks)) if ranks is not None else all_ranks()])
    count("split_group", lambda parent_pg=None, split_ranks=None, *a, **k: list(map(tuple, split_ranks or ())))
    try:
        yield calls
    finally:
        for home, name, original in undo:
            setattr(home, name, original)


def all_ranks() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()))


def overlay_rooms() -> list:
    """The overlay's modules that are loaded: one may hold ``new_group`` by name."""
    import sys

    return [module for name, module in list(sys.modules.items()) if name.startswith("torch_overlay.") and module]


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
