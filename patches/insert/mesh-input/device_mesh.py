"""A mesh has a whole number of ranks on each dim."""

from __future__ import annotations

from ._mesh.arguments import read_sizes


def init_device_mesh():
    mesh_shape = read_sizes(mesh_shape)
    layout = ...
