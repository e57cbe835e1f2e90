"""Checks of the arguments of a new mesh, except for its ranks, before anything changes.

The ranks are read in state.py (`read_view`). An override is what a user gives for one
mesh dim in ``backend_override``: a backend, its options, or both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Backend

if TYPE_CHECKING:  # overlay only
    from collections.abc import Mapping, Sequence


Override = tuple[str | None, Any]  # (backend, options) of one axis


def read_sizes(mesh_shape: Any) -> tuple[int, ...]:
    """The sizes of the axes of a new mesh."""
    sizes = tuple(mesh_shape)
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            "A mesh needs a whole number of ranks, at least 1, on each axis, got "
            f"mesh_shape {sizes}"
        )
    return sizes


def read_overrides(
    overrides: tuple[Override, ...] | None, ndim: int
) -> tuple[Override, ...]:
    """One (backend, options) for each axis; pairs of None if ``overrides`` is None."""
    if overrides is None:
        return ((None, None),) * ndim
    # Only the private constructor argument comes here; init_device_mesh turns a dict
    # into one entry for each axis.
    if len(overrides) != ndim:
        raise ValueError(
            "backend_override should have the same length as the number of mesh "
            "dimensions, "
            f"but got {len(overrides)} and {ndim}."
        )
    return overrides


def read_names(names: Any, ndim: int) -> tuple[str, ...] | None:
    """The names of the axes: usually strings, also numbers and members of an Enum."""
    names = tuple(names or ())
    if not names:
        return None
    if len(names) != ndim:
        raise ValueError(
            f"A mesh of {ndim} axes needs as many mesh_dim_names, got {names}"
        )
    for name in names:
        try:
            hash(name)
        except TypeError:
            raise ValueError(
                "A mesh needs mesh_dim_names that can be hashed, such as strings, "
                f"got {name!r}"
            ) from None
    return names


def check_names(mesh_shape: Any, names: Any) -> None:  # overlay only
    """Check the names of the axes of a new mesh. None passes."""
    if names is None:
        return
    if len(set(names)) != len(names):
        raise RuntimeError(
            "Each mesh_dim_name must be unique. Found repeated mesh_dim_name in "
            f"mesh_dim_names {names}"
        )
    if len(mesh_shape) != len(names):
        raise RuntimeError(
            "mesh_shape and mesh_dim_names should have same length! "
            f"Found len(mesh_dim_names): {len(names)} and "
            f"len(mesh_shape):{len(mesh_shape)}."
        )


def check_device_type(device_type: str) -> None:  # overlay only
    # A mesh spans many devices. The index is each rank's own.
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. ",
            "If you maintained a 'torch.device' object, it's recommended to pass in "
            "'device.type'.",
        )


def _read_override(value: Any, dim: Any) -> Override:  # overlay only
    """One (backend, options); None stands for what the value doesn't say."""
    if isinstance(value, str):
        return value, None
    if value is None or isinstance(value, Backend.Options):
        return None, value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        name, options = value
        # Options may be of any class, since a backend can be registered from Python.
        # But the three here are mistakes, such as a pair of names.
        if isinstance(name, (str, type(None))) and not isinstance(
            options, (str, int, float)
        ):
            return name, options
    raise TypeError(
        f"backend_override for dim {dim!r} is the name of a backend, its options, or "
        f"a pair of both, got {value!r}"
    )


def normalize_overrides(  # overlay only
    overrides: Mapping[Any, Any], ndim: int, mesh_dim_names: Sequence[str] | None
) -> tuple[Override, ...]:
    """One (backend, options) for each axis, from a dict by number or name."""
    names = tuple(mesh_dim_names or ())
    result: list[Override] = []
    for dim in range(ndim):
        by_name = dim < len(names) and names[dim] in overrides
        if by_name and dim in overrides:
            raise RuntimeError(
                f"Found redundant dim index {dim} and name {names[dim]} in "
                "backend_override"
            )
        value = overrides[names[dim]] if by_name else overrides.get(dim, (None, None))
        result.append(_read_override(value, names[dim] if by_name else dim))
    # A misspelled name would otherwise be ignored, and the axis get the default
    # backend.
    unknown = [key for key in overrides if key not in names and key not in range(ndim)]
    if unknown:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {unknown}, "
            f"expected integers in range [0, {ndim}) or one of {names}"
        )
    return tuple(result)
