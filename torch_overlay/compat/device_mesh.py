"""Methods of DeviceMesh that must agree with the DeviceMesh of the release that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from ..distributed import device_mesh as bodies
from ..distributed._mesh.arguments import normalize_overrides
from ..distributed._mesh.state import shared_state, view_of
from ..distributed._torch import flattened_to_torch, to_torch

if TYPE_CHECKING:
    from ..distributed._mesh.arguments import Override


class _DeviceMesh:
    """Bodies of methods of torch's DeviceMesh. Never instantiated."""

    def _create_flatten_mesh(self: DeviceMesh, mesh_dim_name: str, backend_override: Override = (None, None)) -> None:
        """Before 2.13. Collective, and raises, as the body for later releases."""
        bodies._DeviceMesh._create_flatten_mesh(self, mesh_dim_name, backend_override)
        flattened = self._get_root_mesh()._flatten_mapping[mesh_dim_name]
        flattened._layout = flattened_to_torch(view_of(flattened).layout.axes[0])

    def __hash__(self: DeviceMesh) -> int:
        """Torch's hash of an equal mesh: such a mesh may be in a dict since before enable()."""
        if self.__dict__.get("_hash") is None:
            ranks = _Hashed(view_of(self).rank_map.ranks_hash)  # torch hashes the tuple of all ranks
            layout = to_torch(view_of(self).layout)  # on some releases `_layout` has another form than torch hashes
            key: tuple[Any, ...] = (ranks, layout, self._device_type, self._mesh_dim_names, self._thread_id)
            if shared_state(self).private is not None:
                key = (*key, shared_state(self).private)
            self._hash = hash((*key, self._preserve_rank_order) if ORDER_IS_HASHED else key)
        return self._hash


class _OlderDeviceMesh:
    """Bodies for releases before 2.12, where these methods have other callers or other signatures."""

    def _create_flatten_mesh(
        self: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Override = (None, None)
    ) -> DeviceMesh:
        """Before 2.12. Collective, and raises, as the body for later releases."""
        names = self._mesh_dim_names or ()
        name = mesh_dim_name or "_".join(names)
        if self.ndim == 1 and name in names:
            return self
        _DeviceMesh._create_flatten_mesh(self, name, backend_override)
        return self._get_root_mesh()._flatten_mapping[name]

    def _unflatten(
        self: DeviceMesh,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: dict[str, Any] | None = None,
    ) -> DeviceMesh:
        """Before 2.12. Collective: it makes the groups of the new axes."""
        names = self._mesh_dim_names or ()
        if dim not in (names if isinstance(dim, str) else range(-self.ndim, self.ndim)):
            where = f"not in {names}" if isinstance(dim, str) else f"out of range {self.ndim}"
            raise ValueError(f"dim {dim} specified in `_unflatten` is {where}")
        dim = names.index(dim) if isinstance(dim, str) else dim
        if len(mesh_sizes) != len(mesh_dim_names):
            raise RuntimeError(
                f"mesh_dim_names must have same length as mesh_sizes in _unflatten, got {tuple(mesh_dim_names)} for "
                f"{tuple(mesh_sizes)}"
            )
        overrides = normalize_overrides(backend_override or {}, len(mesh_sizes), mesh_dim_names)
        return self._create_unflatten_mesh(dim, tuple(mesh_sizes), tuple(mesh_dim_names), overrides)


class _Hashed:
    """Stands in a tuple for a value of which only the hash is known."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self.value


# Since 2.15 two meshes whose groups order their ranks differently are unequal.
ORDER_IS_HASHED = "_preserve_rank_order" in DeviceMesh.__annotations__
