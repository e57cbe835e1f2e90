"""Bodies that replace methods of torch's DTensorSpec, named as what they replace."""

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
"""Whether two specs say the same, on equal meshes."""


class _DTensorSpec:
    """Never instantiated: its methods are set on torch's DTensorSpec."""

    def _check_equals(
        self: DTensorSpec, other: object, skip_shapes: bool = False
    ) -> bool:
        """Whether one may stand for the other, in a cache or for compiled code: they
        say the same, and on a mesh with the same groups. C++, too, looks results up by
        this.

        Dynamo's guard skips the shapes, since it guards the local ones. See
        `_changes_alike` for what they don't say.
        """
        alike: Any = other if equals_by_value(self, other, skip_shapes) else None
        if alike is None or (skip_shapes and not _changes_alike(self, alike)):
            return False
        return as_good_as(self.mesh, alike.mesh)

    def _stable_hash(self: DTensorSpec) -> str:
        """For caches of compiled code, which other runs and other ranks may read: of
        all that the code has in it. The same in every run that makes the same meshes,
        on this rank; equal meshes have other groups, other ranks too."""
        mesh = real_mesh(self.mesh)
        known: tuple[Any, ...] = (mesh._stable_hash(), *self._hash_key()[1:])
        if config.plan_redistribution:
            known = (*known, _seen_by_this_rank(mesh), get_settings())
        return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


def _changes_alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether local shapes differ on every rank or on none, for two specs that differ
    in the shape at most.

    8 rows over two ranks are 4 and 4, and 7 rows are 4 and 3. Rank 1 sees another local
    shape and compiles anew, and rank 0 doesn't: it would go on with the collectives of
    8 rows, and give 8 rows where there are 7.
    """
    shape, traced = (
        None if spec.tensor_meta is None else spec.tensor_meta.shape
        for spec in (one, other)
    )
    if shape is None or traced is None:
        return True
    for dim, lengths in enumerate(zip(shape, traced)):
        # Of an open size nothing is asked, which would fix it: the graph in which it is
        # open has the guard.
        if type(lengths[0]) is type(lengths[1]) is int and lengths[0] != lengths[1]:
            parts = _parts(one, dim)
            if parts is None or any(length % parts for length in lengths):
                return False
    return True


def _parts(spec: DTensorSpec, dim: int) -> int | None:
    """Into how many equal parts a dim must be cut for all ranks to hold as much of it;
    None if nobody knows."""
    sizes, parts = spec.mesh.shape, 1
    for axis, placement in enumerate(spec.placements):
        cut = getattr(placement, "dim", None)
        if cut is None and not (placement.is_replicate() or placement.is_partial()):
            return None  # a class of a user, or of shards that have no one dim
        if cut == dim and not placement.is_partial():
            parts *= sizes[axis]
    for axis, placement in enumerate(spec.placements):
        # Strided shards are cut into chunks first. The axes that make these are among
        # those above, mostly.
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            parts = math.lcm(parts, placement.split_factor * sizes[axis])
    return parts


def _seen_by_this_rank(mesh: DeviceMesh) -> list[Any]:
    """Its coordinate and its groups: those of the axes, and over which axes together
    there is one."""
    if not is_initialized() or group_names(mesh) is None:
        return []  # and no plan
    joint = [(axes, joint_group_name(mesh, axes)) for axes in sorted(joint_axes(mesh))]
    return [mesh._coordinate_on_dim, group_names(mesh), joint]
