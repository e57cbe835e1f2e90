"""What users pass to make a mesh, checked before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import get_world_size
from torch.utils._python_dispatch import _disable_current_modes

from ._mesh_layout import _MeshLayout
from ._rank_map import RankMap
from ._torch_layout import from_torch
from ._view import View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Override = tuple[str | None, Any]  # (backend, options) of one axis


def read_view(mesh: Any, layout: Any, rank_map: Any) -> View:
    """What DeviceMesh is given: ranks, see `read_mesh`, or the private arguments instead, see `read_layout`."""
    if layout is None and rank_map is None:
        return read_mesh(mesh)
    return read_layout(mesh, layout, rank_map)


def read_mesh(mesh: Any) -> View:
    """Ranks as a tensor, array or nested list, of any shape.

    Raises:
        TypeError: nothing given, or nothing that can be ranks.
        ValueError: no rank at all, a rank that isn't a whole number, doesn't fit in int32, or stands there twice.
    """
    if mesh is None:
        raise TypeError("The mesh argument is required except for PRIVATE USAGE ONLY!")
    if isinstance(mesh, torch.Tensor) and mesh.is_meta:
        raise ValueError(f"A mesh needs ranks, and a tensor on the meta device holds none, got {tuple(mesh.shape)}")
    with _disable_current_modes():
        given = mesh.detach() if isinstance(mesh, torch.Tensor) else torch.tensor(mesh, device="cpu")
        ranks = given.to(device="cpu", dtype=torch.int)
        if given.numel() == 0:
            raise ValueError(f"A mesh needs at least one rank on each axis, got a mesh of shape {tuple(given.shape)}")
        asked, stored = given.flatten().tolist(), ranks.flatten().tolist()
        if asked != stored:
            wrong = next(rank for rank, kept in zip(asked, stored, strict=True) if rank != kept)
            raise ValueError(f"A mesh needs whole ranks from 0 to {torch.iinfo(torch.int).max}, got rank {wrong}")
        return View(RankMap(stored), _MeshLayout.from_sizes_strides(tuple(ranks.shape)))


def read_layout(mesh: Any, layout: Any, rank_map: Any) -> View:
    """The private arguments: a layout and the rank map, as a tensor or, at no cost, as a RankMap.

    Raises:
        TypeError: a mesh besides, or only one of the two.
        AssertionError: overlapping axes, or a rank map that doesn't fit; a RankMap isn't looked at.
    """
    if mesh is not None:
        raise TypeError("Cannot provide _layout and/or _rank_map if passing explicit mesh")
    if layout is None or rank_map is None:
        raise TypeError("The mesh argument is required except for PRIVATE USAGE ONLY!")
    if isinstance(rank_map, RankMap):
        return View(rank_map, layout)
    axes = from_torch(layout)
    if not axes.collapse().check_orthogonal():
        raise AssertionError("Please use a non-overlapping layout when creating a DeviceMesh.")
    if rank_map.ndim != 1:
        raise AssertionError("The rank map must be 1-dimensional")
    if not rank_map.is_contiguous():
        raise AssertionError("The rank map must be contiguous")
    if rank_map.numel() < axes.cosize():
        raise AssertionError(
            f"The rank map contains {rank_map.numel()} element, which isn't large enough for layout {layout}"
        )
    return View(RankMap(rank_map.tolist()), axes)


def read_sizes(mesh_shape: Any) -> tuple[int, ...]:
    """The sizes of a new mesh's axes. Raises TypeError or ValueError for what can't be sizes."""
    sizes = tuple(mesh_shape)
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"A mesh needs a whole number of ranks, at least 1, on each axis, got mesh_shape {sizes}")
    return sizes


def read_overrides(overrides: tuple[Override, ...] | None, ndim: int) -> tuple[Override, ...]:
    """One (backend, options) an axis. Raises ValueError for another number of them."""
    if overrides is None:
        return ((None, None),) * ndim
    if len(overrides) != ndim:
        raise ValueError(
            f"backend_override should have the same length as the number of mesh dimensions, "
            f"but got {len(overrides)} and {ndim}."
        )
    return overrides


def read_names(names: Any, ndim: int) -> tuple[str, ...] | None:
    """The names of the axes, or None: strings as a rule, but numbers and members of an Enum name axes as well.

    Raises:
        ValueError: not one for each axis, or one that can't be a key, so that no look-up would ever find it.
    """
    names = tuple(names or ())
    if not names:
        return None
    if len(names) != ndim:
        raise ValueError(f"A mesh of {ndim} axes needs as many mesh_dim_names, got {names}")
    for name in names:
        try:
            hash(name)
        except TypeError:
            raise ValueError(f"A mesh needs mesh_dim_names that can be hashed, such as strings, got {name!r}") from None
    return names


def check_in_world(rank_map: RankMap) -> None:
    """Raise ValueError for a rank that the world doesn't have."""
    world_size = get_world_size()
    if rank_map.is_identity and rank_map.numel <= world_size:
        return
    for rank in rank_map.ranks():
        if not 0 <= rank < world_size:
            raise ValueError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {world_size - 1} (world_size={world_size})"
            )


def check_names(mesh_shape: Any, names: Any) -> None:  # overlay only
    """Raise RuntimeError unless there is one name for each size, none twice."""
    if names is None:
        return
    if len(set(names)) != len(names):
        raise RuntimeError(f"Each mesh_dim_name must be unique. Found repeated mesh_dim_name in mesh_dim_names {names}")
    if len(mesh_shape) != len(names):
        raise RuntimeError(
            "mesh_shape and mesh_dim_names should have same length! "
            f"Found len(mesh_dim_names): {len(names)} and len(mesh_shape):{len(mesh_shape)}."
        )


def check_device_type(device_type: str) -> None:  # overlay only
    """Raise RuntimeError for a device with a number, such as cuda:0."""
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. ",
            "If you maintained a 'torch.device' object, it's recommended to pass in 'device.type'.",
        )


def _read_override(value: Any, dim: Any) -> Override:
    if isinstance(value, str):
        return value, None
    if value is None or isinstance(value, Backend.Options):
        return None, value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        name, options = value
        # A backend that is registered from Python may have options of any class.
        if isinstance(name, (str, type(None))) and not isinstance(options, (str, int, float)):
            return name, options
    raise TypeError(
        f"backend_override for dim {dim!r} is the name of a backend, its options, or a pair of both, got {value!r}"
    )


def normalize_overrides(
    given: Mapping[Any, Any], ndim: int, mesh_dim_names: Sequence[str] | None
) -> tuple[Override, ...]:
    """One (backend, options) an axis, from a dict by number or name.

    Raises:
        RuntimeError: an axis given twice, or a key that is no axis.
        TypeError: what is neither a backend nor options, nor a pair of them.
    """
    names = tuple(mesh_dim_names or ())
    found: list[Override] = []
    for dim in range(ndim):
        named = dim < len(names) and names[dim] in given
        if named and dim in given:
            raise RuntimeError(f"Found redundant dim index {dim} and name {names[dim]} in backend_override")
        value = given[names[dim]] if named else given.get(dim, (None, None))
        found.append(_read_override(value, names[dim] if named else dim))
    left = [key for key in given if key not in names and key not in range(ndim)]
    if left:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {left}, "
            f"expected integers in range [0, {ndim}) or one of {names}"
        )
    return tuple(found)
