"""What users pass to make a mesh beside its ranks, checked before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Backend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


Override = tuple[str | None, Any]  # (backend, options) of one axis


def read_sizes(mesh_shape: Any) -> tuple[int, ...]:
    """The sizes of a new mesh's axes. Raises TypeError or ValueError for what can't be
    sizes."""
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
    """One (backend, options) an axis. Raises ValueError for another number of them."""
    if overrides is None:
        return ((None, None),) * ndim
    if len(overrides) != ndim:
        raise ValueError(
            "backend_override should have the same length as the number of mesh "
            "dimensions, "
            f"but got {len(overrides)} and {ndim}."
        )
    return overrides


def read_names(names: Any, ndim: int) -> tuple[str, ...] | None:
    """The names of the axes, or None: strings as a rule, but numbers and members of an
    Enum name axes as well.

    Raises:
        ValueError: not one for each axis, or one that can't be a key, so that no
            look-up would ever find it.
    """
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
    """Raise RuntimeError unless there is one name for each size, none twice."""
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
    """Raise RuntimeError for a device with a number, such as cuda:0."""
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. ",
            "If you maintained a 'torch.device' object, it's recommended to pass in "
            "'device.type'.",
        )


def _read_override(value: Any, dim: Any) -> Override:
    if isinstance(value, str):
        return value, None
    if value is None or isinstance(value, Backend.Options):
        return None, value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        name, options = value
        # A backend that is registered from Python may have options of any class.
        if isinstance(name, (str, type(None))) and not isinstance(
            options, (str, int, float)
        ):
            return name, options
    raise TypeError(
        f"backend_override for dim {dim!r} is the name of a backend, its options, or "
        f"a pair of both, got {value!r}"
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
            raise RuntimeError(
                f"Found redundant dim index {dim} and name {names[dim]} in "
                "backend_override"
            )
        value = given[names[dim]] if named else given.get(dim, (None, None))
        found.append(_read_override(value, names[dim] if named else dim))
    left = [key for key in given if key not in names and key not in range(ndim)]
    if left:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {left}, "
            f"expected integers in range [0, {ndim}) or one of {names}"
        )
    return tuple(found)
