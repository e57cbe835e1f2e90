"""A mesh as a tensor of ranks, which is what torch has before 2.10: meshes that torch made, or saved, become views, and
views become such meshes again. Roots and flattened views stand in two dicts of `_mesh_resources`, by a mesh's value.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import get_process_group_ranks

from ..distributed._groups.table import find_group
from ..distributed._mesh.pickling import NOT_PICKLED, OfTheRank
from ..distributed._mesh.rank_map import RankMap
from ..distributed._mesh.state import _living, saved_universe, shared_state, take_back, view_of
from ..distributed._mesh_layout import _FlatLayout, _MeshLayout
from ..distributed._torch_layout import to_torch

# What a view holds, and a mesh of torch's before 2.10 doesn't.
ADOPTED = ("_device_type", "_mesh_dim_names", "_root_mesh", "_flatten_mapping", "_pg_registry", "_layout", "_rank")
SINCE_2_10 = (
    *ADOPTED,
    "_rank_map",
    "_flatten_rank_map",
    "_preserve_rank_order",
    "_apart",
    "_whose_groups",
    "_named_root",
    *NOT_PICKLED,
)

# By the value of a slice, the mesh that may be sliced again for it.
_sliced: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()


class Adopting(OfTheRank):
    """An attribute that a mesh of torch's lacks: asked for, it makes a view of the mesh, which holds it."""

    def __get__(self, mesh: DeviceMesh | None, owner: type) -> Any:
        if mesh is None or "mesh" not in mesh.__dict__ or "_layout" in mesh.__dict__:
            return super().__get__(mesh, owner)
        mesh.__dict__.update(_as_view(mesh.__dict__))
        return getattr(mesh, self.name)


def without_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...], rank: int) -> DeviceMesh:
    """A mesh seen from a rank, for which there need be no world, whether the overlay is on or not."""
    if has_views():
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    mesh = object.__new__(DeviceMesh)
    place = (ranks == rank).nonzero()[0].tolist()
    said = tuple(ranks.flatten().tolist())
    held = {"device_type": device_type, "mesh": ranks, "mesh_dim_names": names, "_flatten_mesh_list": said}
    layout = _MeshLayout.from_sizes_strides(tuple(ranks.shape))
    view = {"_layout": layout, "_flatten_mapping": {}, "_root_mesh": None, "_rank": rank}
    mesh.__dict__.update(held, _thread_id=None, _coordinate_on_dim=place, **view)
    return mesh


def has_views() -> bool:
    """Whether a mesh says what it is of its root: since 2.10, and under the overlay before."""
    return hasattr(DeviceMesh, "_get_root_mesh")


def named_root(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that knows all axes of which this one may be a slice, by their names: torch before 2.10 slices the root
    of a slice again. It is the root, unless an axis of the root was cut into others since; of equal slices, which torch
    takes for one another, it is that of the latest."""
    found = _sliced.get(mesh._hash_key()) or mesh.__dict__.get("_named_root")
    if found is not None:
        return found
    root = mesh._get_root_mesh()
    known = {*(root._mesh_dim_names or ()), *root._flatten_mapping}
    return root if known.issuperset(mesh._mesh_dim_names or ()) else mesh


def note_slice(view: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Note what a slice or a flattened view was made of."""
    if view is not mesh:
        _sliced[view._hash_key()] = view.__dict__["_named_root"] = named_root(mesh)
    return view


def put(mesh: DeviceMesh, name: str, value: Any) -> None:
    """Set what torch holds there, and what a view holds in its place."""
    mesh.__dict__[name] = value
    if "_layout" in mesh.__dict__:
        mesh.__dict__.update({f"_{name}": value, "_hash": None})


def as_saved_since_2_10(state: dict[str, Any]) -> dict[str, Any]:
    """What a file says of a mesh, as releases with layouts say it."""
    if "_layout" in state or "mesh" not in state:
        return state
    ranks = state.get("_flatten_rank_map", state["_flatten_mesh_list"])
    kept = {name: value for name, value in state.items() if name not in ("mesh", "device_type", "mesh_dim_names")}
    shape = tuple(state["mesh"].shape)
    layout = _layout_of(shape, state["_flatten_mesh_list"], RankMap(ranks))
    if layout is None:
        raise ValueError(f"This file's mesh has the ranks {state['_flatten_mesh_list']}, which its root {ranks} hasn't")
    kept |= {"_device_type": state["device_type"], "_mesh_dim_names": state["mesh_dim_names"]}
    kept["_layout"] = to_torch(layout)
    kept.setdefault("_root_mesh", None)
    kept.setdefault("_flatten_mapping", {})
    kept["_flatten_rank_map"] = tuple(ranks)
    return kept


def as_tensor(mesh: DeviceMesh) -> dict[str, Any]:
    """What torch before 2.10 holds of a mesh, beside its groups and coordinates."""
    ranks = mesh.mesh.clone()  # a view of all ranks would be saved with all of them
    said = tuple(ranks.flatten().tolist())
    names = mesh._mesh_dim_names
    return {"device_type": mesh._device_type, "mesh": ranks, "mesh_dim_names": names, "_flatten_mesh_list": said}


def hold_views() -> None:
    """Meshes are views while the overlay is on."""


def hand_back_tensors(_: None) -> None:
    """Make the views that live meshes of torch's, and put them into its two dicts, by which it finds their roots and
    what was flattened."""
    living = list(_living.values())
    roots = [(mesh, named_root(mesh)) for mesh in living]
    flattened = [(mesh, name, view) for mesh in living for name, view in mesh._flatten_mapping.items()]
    found = [(*one, dims_in_root(one[0], view_of(one[2]).layout.axes[0], one[1])) for one in flattened]
    living = list(_living.values())  # with those that were asked for the first time
    held = [as_tensor(mesh) | _left(mesh) for mesh in living]
    resources = device_mesh._mesh_resources.__dict__
    resources["child_to_root_mapping"].update((mesh, root) for mesh, root in roots if mesh is not root)
    for mesh, name, view, dims in found:
        if dims is not None:
            resources["child_to_root_mapping"][view] = mesh
            resources["root_to_flatten_mapping"].setdefault(mesh, {})[name] = view
            resources["flatten_name_to_root_dims"].setdefault(mesh, {})[name] = dims
    for mesh, tensor in zip(living, held, strict=True):
        take_back(mesh.__dict__)
        for name in SINCE_2_10:
            mesh.__dict__.pop(name, None)
        mesh.__dict__.update(tensor)


def _left(mesh: DeviceMesh) -> dict[str, Any]:
    """What a mesh with a universe keeps, if it comes back as a root: torch's dicts may have an equal slice, of an older
    world even."""
    view, left = view_of(mesh), saved_universe(shared_state(mesh))
    whole = view.layout.collapse() == _FlatLayout((view.rank_map.numel,))  # in the order of the universe
    is_root = mesh._get_root_mesh() is mesh or (whole and named_root(mesh) is mesh)
    return {"_universe": left} if is_root and left[0] is not None else {}


def dims_in_root(root: DeviceMesh, axis: _FlatLayout, name: str = "") -> tuple[int, ...] | None:
    """Which axes of the root make up this one, as torch numbers them; None where none do. Axes of one rank add nothing
    to tell by, so those that the name joins go first."""
    layout, names = view_of(root).layout, root._mesh_dim_names or ()
    counts = range(1, len(layout.axes) + 1)
    tried = [dims for count in counts for dims in itertools.combinations(range(len(layout.axes)), count)]
    tried.sort(key=lambda dims: "_".join(str(names[dim]) for dim in dims if names) != name)
    return next((dims for dims in tried if layout.select(dims).collapse() == axis), None)


def _as_view(held: dict[str, Any]) -> dict[str, Any]:
    """What a mesh of torch's would hold as a view of its root, or as a root."""
    made = {
        "_device_type": held["device_type"],
        "_mesh_dim_names": held["mesh_dim_names"],
        "_root_mesh": None,
        "_flatten_mapping": {},
        "_pg_registry": {},
        "_hash": held.get("_hash"),
    }
    shape = tuple(held["mesh"].shape)
    root = None if "_universe" in held else _root(held)
    layout = None if root is None else _layout_of(shape, held["_flatten_mesh_list"], view_of(root).rank_map)
    if layout is not None:
        return {**made, "_root_mesh": root, "_layout": layout}
    flattened = _found(held, "root_to_flatten_mapping") or {}
    made["_flatten_mapping"] = {name: mesh for name, mesh in flattened.items() if _has_group(mesh.__dict__)}
    ranks = held["_flatten_mesh_list"]
    return {**made, "_layout": _MeshLayout.from_sizes_strides(shape), "_flatten_rank_map": ranks}


def _root(held: dict[str, Any]) -> DeviceMesh | None:
    """The root of the mesh; None for a root, and where meshes of equal value are each other's roots."""
    found: list[DeviceMesh] = []
    above = _found(held, "child_to_root_mapping")
    while above is not None:
        if any(above is mesh for mesh in found):
            return None
        found.append(above)
        above = _found(above.__dict__, "child_to_root_mapping")
    return found[-1] if found else None


def _found(held: dict[str, Any], mapping: str) -> Any:
    """What torch's dict has for a mesh that is equal to this one, as torch compares them."""
    wanted = _value(held)
    known: dict[DeviceMesh, Any] = vars(device_mesh._mesh_resources)[mapping]
    return next((found for mesh, found in known.items() if _value(mesh.__dict__) == wanted), None)


def _has_group(held: dict[str, Any]) -> bool:
    """Whether a flattened mesh has its group: torch's dicts outlive the world, and names come again in the next."""
    name = next(iter(held.get("_dim_group_names", ())), None)
    group = None if name is None else find_group(name)
    return group is not None and sorted(get_process_group_ranks(group)) == sorted(held["_flatten_mesh_list"])


def _value(held: dict[str, Any]) -> tuple[Any, ...] | None:
    """What torch compares two meshes by."""
    if "mesh" not in held:
        return None
    return (
        held["_flatten_mesh_list"],
        held["mesh"].shape,
        held["device_type"],
        held["mesh_dim_names"],
        held["_thread_id"],
    )


def _layout_of(shape: Sequence[int], ranks: Sequence[int], rank_map: RankMap) -> _MeshLayout | None:
    """The layout over a rank map that shows these ranks, row-major; None if there is none."""
    indices = [rank_map.index(rank) for rank in ranks]
    if None in indices:
        return None
    axes: list[_FlatLayout] = []
    inner = len(indices)
    for size in shape:
        inner //= size
        axes.append(_axis([indices[place * inner] - indices[0] for place in range(size)]))  # type: ignore[operator]
    layout = _MeshLayout(tuple(axes))
    shown = layout.collapse()
    if not shown.check_orthogonal() or rank_map.numel % max(1, shown.numel()):
        return None
    start = indices[0]
    found = [start + offset for offset in shown.all_ranks_from_zero()]  # type: ignore[operator]
    return layout if found == indices and layout.origin(start) == start else None  # type: ignore[arg-type]


def _axis(offsets: Sequence[int]) -> _FlatLayout:
    """The axis that steps by these offsets from 0 on, if any does: modes from the innermost on."""
    modes: list[tuple[int, int]] = []
    done = 1
    while done < len(offsets):
        step = offsets[done]
        count = next(n for n in itertools.count(1) if n * done >= len(offsets) or offsets[n * done] != n * step)
        modes.append((count, max(0, step)))
        done *= count
    return _FlatLayout(tuple(size for size, _ in reversed(modes)), tuple(step for _, step in reversed(modes)))
