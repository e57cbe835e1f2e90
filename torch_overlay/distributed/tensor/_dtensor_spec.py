"""Bodies that replace methods of torch's DTensorSpec, named as what they replace."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import is_initialized
from torch.distributed.tensor import _dtensor_spec as torch_spec

from .. import config
from .._groups.finding import joint_group_name
from .._groups.settings import get_settings
from .._mesh.caches import as_good_as, real_mesh
from .._mesh.state import group_names
from .._torch_originals import original
from ._plans.groups import joint_axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


equals_by_value = original(torch_spec.DTensorSpec, "_check_equals")
"""Whether two specs say the same, on equal meshes."""


class _DTensorSpec:
    """Never instantiated: its methods are set on torch's DTensorSpec."""

    def _check_equals(self: DTensorSpec, other: object, skip_shapes: bool = False) -> bool:
        """Whether one may stand for the other, in a cache or for compiled code: they say the same, and on a mesh with
        the same groups. C++, too, looks results up by this."""
        alike: Any = other if equals_by_value(self, other, skip_shapes) else None
        return alike is not None and as_good_as(self.mesh, alike.mesh)

    def _stable_hash(self: DTensorSpec) -> str:
        """For caches of compiled code, which other runs and other ranks may read: of all that the code has in it. The
        same in every run that makes the same meshes, on this rank; equal meshes have other groups, other ranks too."""
        mesh = real_mesh(self.mesh)
        known: tuple[Any, ...] = (mesh._stable_hash(), *self._hash_key()[1:])
        if config.plan_redistribution:
            known = (*known, _seen_by_this_rank(mesh), get_settings())
        return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


def _seen_by_this_rank(mesh: DeviceMesh) -> list[Any]:
    """Its coordinate and its groups: those of the axes, and over which axes together there is one."""
    if not is_initialized() or group_names(mesh) is None:
        return []  # and no plan
    joint = [(axes, joint_group_name(mesh, axes)) for axes in sorted(joint_axes(mesh))]
    return [mesh._coordinate_on_dim, group_names(mesh), joint]
