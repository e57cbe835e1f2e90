"""The ranks of a mesh as users pass them, checked before anything changes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.distributed_c10d import get_world_size
from torch.utils._python_dispatch import _disable_current_modes

from .._mesh_layout import _MeshLayout
from .._torch import from_torch
from .rank_map import RankMap, View


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
