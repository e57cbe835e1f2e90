"""Equality and hash of DTensorSpec for caches: two specs may stand for one another only
if their meshes have the same process groups."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import is_initialized
from torch.distributed.tensor import _dtensor_spec as torch_spec
from torch.distributed.tensor.placement_types import _StridedShard

from .. import config
from .._mesh.caches import as_good_as, real_mesh
from .._mesh.groups import joint_group_name
from .._mesh.state import group_names
from .._mesh.universe import get_settings
from .._torch import original
from ._runner.at_hand import joint_axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


equals_by_value = original(torch_spec.DTensorSpec, "_check_equals")
"""Compares placements and shapes, and meshes by their ranks only."""


class _DTensorSpec:
    """Bodies of methods of DTensorSpec. Never instantiated."""

    def _check_equals(
        self: DTensorSpec, other: object, skip_shapes: bool = False
    ) -> bool:
        """True if `other` may stand for this spec in caches, also in that of sharding
        propagation in C++: it is equal, and its mesh has the same process groups."""
        alike: Any = other if equals_by_value(self, other, skip_shapes) else None
        if alike is None or (skip_shapes and not _changes_alike(self, alike)):
            return False
        return as_good_as(self.mesh, alike.mesh)

    def _stable_hash(self: DTensorSpec) -> str:
        """Return a hash for caches of compiled code, which other runs and other ranks
        may read. It is the same on this rank in every run that makes the same meshes.
        """
        mesh = real_mesh(self.mesh)
        key: tuple[Any, ...] = (mesh._stable_hash(), *self._hash_key()[1:])
        # A compiled plan contains the coordinate and the names of process groups, so
        # ranks differ, as do equal meshes with other groups, and other settings.
        if config.plan_redistribution:
            key = (*key, _seen_by_this_rank(mesh), get_settings())
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


def _changes_alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """True if it is certain that local shapes differ on every rank or on none, for two
    specs that differ in the global shape at most: each dim whose length differs is cut
    evenly in both. Symbolic lengths are left to the guards of their graph.

    8 rows over two ranks are 4 and 4, 7 rows are 4 and 3. Rank 1 sees another local
    shape and compiles anew; rank 0 doesn't. It would go on with the collectives for 8
    rows, and return 8 rows where there are 7.
    """
    shape, other_shape = (
        None if spec.tensor_meta is None else spec.tensor_meta.shape
        for spec in (one, other)
    )
    if shape is None or other_shape is None:
        return True
    for dim, lengths in enumerate(zip(shape, other_shape)):
        # Don't look at a symbolic size, which would specialize it. Its graph has a
        # guard.
        if type(lengths[0]) is type(lengths[1]) is int and lengths[0] != lengths[1]:
            parts = _even_divisor(one, dim)
            if parts is None or any(length % parts for length in lengths):
                return False
    return True


def _even_divisor(spec: DTensorSpec, dim: int) -> int | None:
    """Return a number whose multiples all ranks share evenly on this dim; 1 if no
    placement cuts it, None if a placement doesn't tell."""
    sizes, parts = spec.mesh.shape, 1
    for axis, placement in enumerate(spec.placements):
        cut = getattr(placement, "dim", None)
        if cut is None and not (placement.is_replicate() or placement.is_partial()):
            # A placement class of a user, or one that shards more than one dim.
            return None
        if cut == dim and not placement.is_partial():
            parts *= sizes[axis]
    for axis, placement in enumerate(spec.placements):
        # A strided shard is cut into `split_factor` chunks first. Usually the axes
        # whose sizes make up that factor are counted above already.
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            parts = math.lcm(parts, placement.split_factor * sizes[axis])
    return parts


def _seen_by_this_rank(mesh: DeviceMesh) -> list[Any]:
    """Return what compiled code contains of this rank: its coordinate, and the names of
    its process groups, joint ones by their axes. Empty where nothing is planned."""
    if not is_initialized() or group_names(mesh) is None:
        return []  # nothing is planned on such a mesh
    joint = [(axes, joint_group_name(mesh, axes)) for axes in sorted(joint_axes(mesh))]
    return [mesh._coordinate_on_dim, group_names(mesh), joint]
