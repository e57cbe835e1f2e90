"""A mesh has a whole number of ranks on each dim, and takes nothing out of the caller's dict."""

from __future__ import annotations


def init_device_mesh():
    if any(not isinstance(size, int) or size < 1 for size in mesh_shape):
        raise ValueError(
            f"A mesh needs a whole number of ranks, at least 1, on each axis, got mesh_shape {tuple(mesh_shape)}"
        )
    layout = ...


def _normalize_backend_override():
    backend_override = dict(backend_override)  # entries are taken out below
    if mesh_dim_names is None:
        ...
