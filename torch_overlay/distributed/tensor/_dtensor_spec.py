"""The body that replaces a method of torch's DTensorSpec, named as what it replaces."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import is_initialized

from .. import config
from .._mesh_group_names import group_names
from .._mesh_traced import real_mesh
from .._settings import get_settings
from ._joint_groups import joint_axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class _DTensorSpec:
    """Never instantiated: its method is set on torch's DTensorSpec."""

    def _stable_hash(self: DTensorSpec) -> str:
        """The same in every process, for caches of compiled code, which has plans in it: of all that they depend on."""
        mesh = real_mesh(self.mesh)
        known: tuple[Any, ...] = (mesh._stable_hash(), *self._hash_key()[1:])
        if config.plan_redistribution:
            known = (*known, _joint_axes_of(mesh), get_settings())
        return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


def _joint_axes_of(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    if not is_initialized() or group_names(mesh) is None:
        return []  # and no plan
    return sorted(joint_axes(mesh))
