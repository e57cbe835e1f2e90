"""Upstream plans can be turned off, and then compiled code depends on the mesh and the placements alone."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.distributed import config

from .._mesh_traced import real_mesh
from .._settings import get_settings

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class _DTensorSpec(...):
    def _stable_hash(self: DTensorSpec) -> str:
        """The same in every process, for caches of compiled code, which has plans in it: of all that they depend on."""
        mesh = real_mesh(self.mesh)
        known: tuple[Any, ...] = (mesh._stable_hash(), *self._hash_key()[1:])
        if config.plan_redistribution:
            known = (*known, _joint_axes_of(mesh), get_settings())
        return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()
