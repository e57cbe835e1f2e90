"""How torch before 2.10 finds the root of a mesh, its slices and its flattened views: through `_mesh_resources`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ..distributed._mesh.axes import ascending, select
from ..distributed._mesh.state import _living, view_of
from .tensor_mesh import dims_in_root, named_root

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed._mesh.input import Override


class _Roots(Mapping["DeviceMesh", "DeviceMesh"]):
    """The root of each view that lives; a root has none here."""

    def __getitem__(self, mesh: DeviceMesh) -> DeviceMesh:
        root = named_root(mesh)
        if root is mesh:
            raise KeyError(mesh)
        return root

    def __iter__(self) -> Iterator[DeviceMesh]:
        return (mesh for mesh in list(_living.values()) if named_root(mesh) is not mesh)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Flattened(MutableMapping["DeviceMesh", "dict[str, DeviceMesh]"]):
    """The flattened views of each root, by name: the very dict that is the root's `_flatten_mapping`."""

    def __getitem__(self, mesh: DeviceMesh) -> dict[str, DeviceMesh]:
        if not mesh._flatten_mapping:
            raise KeyError(mesh)
        return mesh._flatten_mapping

    def __setitem__(self, mesh: DeviceMesh, flattened: dict[str, DeviceMesh]) -> None:
        mesh._flatten_mapping.update(flattened)

    def setdefault(self, mesh: DeviceMesh, flattened: Any = None) -> dict[str, DeviceMesh]:
        return mesh._flatten_mapping

    def __delitem__(self, mesh: DeviceMesh) -> None:
        mesh._flatten_mapping.clear()

    def __iter__(self) -> Iterator[DeviceMesh]:
        return (mesh for mesh in list(_living.values()) if mesh._flatten_mapping)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Dims(Mapping["DeviceMesh", "dict[str, tuple[int, ...]]"]):
    """The numbers of the root's axes that each flattened view joins, by its name."""

    def __getitem__(self, mesh: DeviceMesh) -> dict[str, tuple[int, ...]]:
        views = _Flattened()[mesh].items()
        return {name: dims_in_root(mesh, view_of(view).layout.axes[0], name) or () for name, view in views}

    def __iter__(self) -> Iterator[DeviceMesh]:
        return iter(_Flattened())

    def __len__(self) -> int:
        return len(_Flattened())


class _MeshEnv:
    """Never instantiated: set on torch's class of this name, of which each thread has dicts of its own."""

    @property
    def child_to_root_mapping(self) -> Mapping[DeviceMesh, DeviceMesh]:
        return _Roots()

    @child_to_root_mapping.setter
    def child_to_root_mapping(self, mapping: dict[DeviceMesh, DeviceMesh]) -> None:
        self.__dict__["child_to_root_mapping"] = mapping  # of a new thread

    @property
    def root_to_flatten_mapping(self) -> MutableMapping[DeviceMesh, dict[str, DeviceMesh]]:
        return _Flattened()

    @root_to_flatten_mapping.setter
    def root_to_flatten_mapping(self, mapping: dict[DeviceMesh, dict[str, DeviceMesh]]) -> None:
        self.__dict__["root_to_flatten_mapping"] = mapping

    @property
    def flatten_name_to_root_dims(self) -> Mapping[DeviceMesh, dict[str, tuple[int, ...]]]:
        return _Dims()

    @flatten_name_to_root_dims.setter
    def flatten_name_to_root_dims(self, mapping: dict[DeviceMesh, dict[str, tuple[int, ...]]]) -> None:
        self.__dict__["flatten_name_to_root_dims"] = mapping

    def get_root_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        return named_root(device_mesh)

    def create_sub_mesh(
        self, device_mesh: DeviceMesh, submesh_dim_names: tuple[str, ...], submesh_dims: list[tuple[int, ...]]
    ) -> DeviceMesh:
        """The slice of these names, which say all that the numbers do."""
        return device_mesh._create_sub_mesh(ascending(device_mesh, submesh_dim_names), submesh_dim_names)

    def create_flatten_mesh(
        self, device_mesh: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Override = (None, None)
    ) -> DeviceMesh:
        return device_mesh._create_flatten_mesh(mesh_dim_name, backend_override)

    def _get_slice_mesh_dims(self, device_mesh: DeviceMesh, mesh_dim_names: tuple[str, ...]) -> list[tuple[int, ...]]:
        """The numbers of the root's axes that each name stands for; raises KeyError where a slice would."""
        ascending(device_mesh, mesh_dim_names)
        axes = [select(device_mesh, (name,)).axes[0] for name in mesh_dim_names]
        return [dims_in_root(device_mesh, axis) or () for axis in axes]

    def _get_all_submeshes(self, device_mesh: DeviceMesh, mesh_dim_name: str) -> list[DeviceMesh]:
        return device_mesh._get_all_submeshes(mesh_dim_name)
