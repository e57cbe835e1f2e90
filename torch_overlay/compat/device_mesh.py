"""What must agree with the DeviceMesh of the very release that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group, get_rank, is_initialized

from ..distributed import device_mesh as bodies
from ..distributed._mesh.input import normalize_overrides, read_overrides
from ..distributed._mesh.ranks import read_mesh
from ..distributed._mesh.state import _living, shared_state, view_of
from ..distributed._mesh_layout import _FlatLayout
from ..distributed._torch_layout import to_torch
from ._mesh_layout import flattened_layout
from .tensor_mesh import Adopting, as_saved_since_2_10, as_tensor, note_slice, put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..distributed._mesh.input import Override

# What a file needn't say twice.
SAVED_AS_TENSOR = ("_device_type", "_mesh_dim_names", "_layout", "_rank_map", "_named_root")


class _DeviceMesh:
    """Never instantiated: its methods are set on torch's DeviceMesh."""

    def _create_flatten_mesh(self: DeviceMesh, mesh_dim_name: str, backend_override: Override = (None, None)) -> None:
        """Before 2.13, where a flattened view says its layout otherwise: torch's own code, too, finds it by that."""
        bodies._DeviceMesh._create_flatten_mesh(self, mesh_dim_name, backend_override)
        flattened = self._get_root_mesh()._flatten_mapping[mesh_dim_name]
        flattened._layout = flattened_layout(view_of(flattened).layout.axes[0])

    def __setstate__(self: DeviceMesh, state: dict[str, Any]) -> None:
        """From files of any release: before 2.10 they say it by a tensor."""
        bodies._DeviceMesh.__setstate__(self, as_saved_since_2_10(state))

    def __hash__(self: DeviceMesh) -> int:
        """As torch hashes an equal mesh, which may be in a dict since before enable(); from its ranks as a tuple."""
        if self.__dict__.get("_hash") is None:
            ranks = _Hashed(view_of(self).rank_map.ranks_hash)
            layout = to_torch(view_of(self).layout)  # its own may be spelled otherwise, which some releases do
            key: tuple[Any, ...] = (ranks, layout, self._device_type, self._mesh_dim_names, self._thread_id)
            if shared_state(self).private is not None:
                key = (*key, shared_state(self).private)
            self._hash = hash((*key, self._preserve_rank_order) if ORDER_IS_HASHED else key)
        return self._hash


class _OlderDeviceMesh:
    """The same, for releases in which the methods that call these, or are called, are others."""

    def _create_flatten_mesh(
        self: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Override = (None, None)
    ) -> DeviceMesh:
        """Before 2.12, where this finds the name and answers with the mesh."""
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
        """Before 2.12, where an axis can't be named: torch refuses the names that the mesh has."""
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

    # Before 2.11 a mesh holds its coordinates as a list, and no groups.

    def _compute_coordinate_on_dim(self: DeviceMesh) -> list[int] | None:
        return _listed(view_of(self).coordinate(self._rank))

    def __setstate__(self: DeviceMesh, state: dict[str, Any]) -> None:
        _DeviceMesh.__setstate__(self, state)
        for held in (self.__dict__, getattr(self.__dict__.get("_of_saver"), "said", {})):
            if "_coordinate_on_dim" in held:
                held["_coordinate_on_dim"] = _listed(held["_coordinate_on_dim"])

    def _is_current_rank_part_of_mesh(self: DeviceMesh) -> bool:
        return self.get_coordinate() is not None

    def _sym_get_coordinate(self: DeviceMesh, index: int) -> int:
        """This rank's place on an axis; before 2.11 no code is compiled on one rank for all."""
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise AssertionError(f"Rank {self.get_rank()} isn't in the mesh {self}, so it has no place on its axes")
        return coordinate[index]


class _OldestDeviceMesh:
    """The same before 2.10, where a mesh is a tensor."""

    def __init__(
        self: DeviceMesh,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
        backend_override: tuple[Override, ...] | None = None,
        _init_backend: bool = True,
        **private: Any,
    ) -> None:
        """With the backends and options that `_mesh_resources` was told for an axis, of whatever mesh."""
        told = device_mesh._mesh_resources.mesh_dim_group_options
        if told and _init_backend:
            ndim = len((read_mesh(mesh).layout if mesh is not None else private["_layout"]).axes)
            given = read_overrides(backend_override, ndim)
            twice = [dim for dim in told if dim < ndim and given[dim] != (None, None)]
            if twice:
                raise RuntimeError(
                    f"Dimension {twice[0]} present both in the backend_override argument and via "
                    "_mesh_resources._set_mesh_dim_group_options"
                )
            backend_override = tuple(told.get(dim, given[dim]) for dim in range(ndim))
        named: dict[str, Any] = {"mesh_dim_names": mesh_dim_names, "backend_override": backend_override}
        bodies._DeviceMesh.__init__(self, device_type, mesh, _init_backend=_init_backend, **named, **private)

    # Attributes that programs may set, and subclasses with an __init__ of their own do.
    mesh = property(bodies._DeviceMesh.mesh.fget, lambda self, ranks: put(self, "mesh", ranks))  # type: ignore[attr-defined]
    device_type = property(lambda self: self._device_type, lambda self, name: put(self, "device_type", name))
    mesh_dim_names = property(lambda self: self._mesh_dim_names, lambda self, names: put(self, "mesh_dim_names", names))

    @property
    def _flatten_mesh_list(self: DeviceMesh) -> tuple[int, ...]:
        return tuple(self.mesh.flatten().tolist())

    @_flatten_mesh_list.setter
    def _flatten_mesh_list(self: DeviceMesh, ranks: tuple[int, ...]) -> None:
        self.__dict__["_flatten_mesh_list"] = ranks

    # What meshes that torch made hold only once they are asked.
    _device_type = Adopting()
    _mesh_dim_names = Adopting()
    _root_mesh = Adopting()
    _flatten_mapping = Adopting()
    _pg_registry = Adopting()
    _layout = Adopting()
    _rank = Adopting()

    def __getitem__(self: DeviceMesh, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """As the body; the slice remembers which mesh may be sliced again."""
        return note_slice(bodies._DeviceMesh.__getitem__(self, mesh_dim_names), self)

    def _create_flatten_mesh(
        self: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Override = (None, None)
    ) -> DeviceMesh:
        return note_slice(_OlderDeviceMesh._create_flatten_mesh(self, mesh_dim_name, backend_override), self)

    def __hash__(self: DeviceMesh) -> int:
        """As torch hashes an equal mesh: from the ranks that this one sees."""
        if self.__dict__.get("_hash") is None:
            view = view_of(self)
            whole = view.layout.collapse() == _FlatLayout((view.rank_map.numel,))
            held = self.__dict__  # a mesh for XLA has no rank, and one of a subclass what it says
            rank = get_rank() if is_initialized() else held.get("_rank", 0)
            ranks = _Hashed(view.rank_map.ranks_hash) if whole else tuple(view.ranks(rank))
            said = self._device_type, self._mesh_dim_names, held.get("_thread_id")
            key: tuple[Any, ...] = (ranks, self.shape, *said)
            private = shared_state(self).private
            self._hash = hash(key if private is None else (*key, private))
        return self._hash

    def __getstate__(self: DeviceMesh) -> dict[str, Any]:
        """What torch reads here, and beside it what other releases need to know of the universe."""
        state = {**bodies._DeviceMesh.__getstate__(self), **as_tensor(self)}
        return {name: state[name] for name in state if name not in SAVED_AS_TENSOR}

    def _get_root_mesh(self: DeviceMesh) -> DeviceMesh:
        return self if self._root_mesh is None else self._root_mesh

    def _get_root_mesh_dim(self: DeviceMesh) -> int | None:
        return device_mesh._mesh_resources.get_root_mesh_dim(self)

    def _get_mesh_dim_by_name(self: DeviceMesh, mesh_dim_name: str) -> int:
        return device_mesh._mesh_resources.get_mesh_dim_by_name(self, mesh_dim_name)

    def size(self: DeviceMesh, mesh_dim: int | None = None) -> int:
        layout = view_of(self).layout
        return layout.numel() if mesh_dim is None else layout.axes[mesh_dim].numel()

    @property
    def ndim(self: DeviceMesh) -> int:
        return len(view_of(self).layout.axes)

    @property
    def shape(self: DeviceMesh) -> tuple[int, ...]:
        return view_of(self).layout.top_level_sizes


def _listed(coordinate: Sequence[int] | None) -> list[int] | None:
    return None if coordinate is None else list(coordinate)


def _get_pg_from_name(mesh: DeviceMesh, name: str) -> ProcessGroup:
    """Before 2.11 torch traces no groups that a mesh holds, so a name is all it takes."""
    return _resolve_process_group(name)


def hold_groups() -> None:
    """Meshes hold their groups while the overlay is on."""


def drop_groups(_: None) -> None:
    """Before 2.11 torch saves and copies all that a mesh holds, and groups can't be."""
    for mesh in list(_living.values()):
        mesh.__dict__.pop("_pg_registry", None)


class _Hashed:
    """Stands in a key for a value of which only the hash is at hand."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self.value


# Since 2.15 the order of the ranks in groups is a part of a mesh's value.
ORDER_IS_HASHED = "_preserve_rank_order" in DeviceMesh.__annotations__
