"""Bodies that replace methods of torch's DeviceMesh and functions of its module, named
as what they replace.

`_DeviceMesh` only carries the methods to torch's class, which stays the same object.
Messages are torch's own wherever torch has one. Methods not listed here (``size``,
``shape``, ``get_coordinate``, ``get_local_rank``, ``from_group``, ``_flatten`` …) work
on what these leave in the mesh.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup, get_rank, is_initialized
from torch.utils._python_dispatch import _disable_current_modes

from ._mesh.arguments import (
    check_device_type,
    check_names,
    normalize_overrides,
    read_names,
    read_overrides,
    read_sizes,
)
from ._mesh.axes import (
    ascending,
    cut_axis,
    dim_of,
    is_flattened,
    mark_apart,
    mark_beside,
    mark_slice,
    select,
    select_groups,
    side_by_side,
    start_at,
)
from ._mesh.caches import is_traced, keep_view, note_root, real_mesh, traced_view
from ._mesh.groups import (
    Request,
    abort_groups,
    axis_group,
    group_by_name,
    make_groups,
    make_joint_groups,
    make_own_groups,
)
from ._mesh.pickling import OfTheRank, load_state, saved_state
from ._mesh.rank_map import RankMap, View, Window
from ._mesh.state import (
    check_in_world,
    copy_mesh,
    group_names,
    join_state,
    make_view,
    make_window,
    read_view,
    shared_state,
    thread_id,
    view_of,
    whose_groups,
)
from ._mesh.universe import current_world
from ._mesh_layout import _MeshLayout
from ._torch import axis_from_torch, from_torch, to_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ._mesh.arguments import Override
    from ._mesh.state import TracedViews

_Names = tuple[str, ...]


class _DeviceMesh:
    """Never instantiated: its attributes are set on torch's DeviceMesh."""

    # Meshes pickled before this attribute existed lack it.
    _preserve_rank_order = False
    _rank: int = OfTheRank()  # type: ignore[assignment]
    _coordinate_on_dim: Any = OfTheRank()
    _dim_group_names: list[str] = OfTheRank()  # type: ignore[assignment]

    def __init__(
        self: DeviceMesh,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: _Names | None = None,
        backend_override: tuple[Override, ...] | None = None,
        preserve_rank_order: bool = False,
        _init_backend: bool = True,
        _rank: int | None = None,
        _layout: Any = None,
        _rank_map: RankMap | torch.Tensor | None = None,
        _root_mesh: DeviceMesh | None = None,
    ) -> None:
        torch._C._log_api_usage_once(
            "torch.distributed.device_mesh.DeviceMesh.__init__"
        )
        view = read_view(mesh, _layout, _rank_map)
        overrides = read_overrides(backend_override, len(view.layout.axes))
        self._mesh_dim_names = read_names(mesh_dim_names, len(view.layout.axes))
        shared = join_state(self, view, _root_mesh)  # sets _layout, _in_universe
        if _root_mesh is None:
            note_root(shared)
        self._device_type = device_type
        self._root_mesh = None if _root_mesh is None else _root_mesh._get_root_mesh()
        self._preserve_rank_order = preserve_rank_order
        # A new view's own are empty: look-ups go through its root.
        self._flatten_mapping = shared.flattened if _root_mesh is None else {}
        self._pg_registry = shared.registry if _root_mesh is None else {}
        self._thread_id = None
        self._hash: int | None = None
        if device_type == "xla":
            return  # DeviceMesh makes no groups on XLA, and sets no rank or coordinates
        if _init_backend:
            # makes the default group if there is none
            self._setup_world_group_and_device()
            check_in_world(shared.rank_map)
            make_own_groups(self, overrides)
        self._thread_id = thread_id()
        self._rank = get_rank() if _rank is None else _rank
        self._coordinate_on_dim = self._compute_coordinate_on_dim()

    # --- what torch stores, made on request

    @cached_property
    def _rank_map(self: DeviceMesh) -> torch.Tensor:
        """The rank at each index, one dimension, int32; made when it is first read,
        once for a root and all its views. A cached_property, not a property: subclasses
        that skip this constructor assign it. Assigning it to a mesh that has its view
        changes `mesh`, not its coordinates."""
        return shared_state(self).tensor

    @cached_property
    def _flatten_rank_map(self: DeviceMesh) -> tuple[int, ...]:
        """`_rank_map` as a tuple."""
        return shared_state(self).ranks

    @property
    def mesh(self: DeviceMesh) -> torch.Tensor:
        """The ranks as a tensor of the mesh's shape; a rank outside the mesh sees the
        first copy. A view of the one tensor that the root and all its views share,
        wherever strides can say it."""
        view = view_of(self)
        # A mesh for xla has no _rank; with -1 it shows the first copy.
        rank = get_rank() if is_initialized() else getattr(self, "_rank", -1)
        # real ranks under fake tensors, the meta device and while tracing
        with _disable_current_modes():
            return shared_state(self).shown(view.layout, view.start(rank))

    def _compute_coordinate_on_dim(self: DeviceMesh) -> tuple[int, ...] | None:
        return view_of(self).coordinate(self._rank)

    # --- as a value

    def _hash_key(self: DeviceMesh) -> tuple[Any, ...]:
        view, names = view_of(self), self._mesh_dim_names
        return (
            view.rank_map.key,
            view.layout,
            self._device_type,
            names,
            self._thread_id,
            *whose_groups(self),
        )

    def __eq__(self: DeviceMesh, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return False
        mesh = real_mesh(other)
        return (
            self._hash_key() == mesh._hash_key()
            and self._preserve_rank_order == mesh._preserve_rank_order
        )

    def _stable_hash(self: DeviceMesh) -> str:
        """The same in every process, for caches of compiled code."""
        return hashlib.blake2b(
            repr((self._hash_key(), self._preserve_rank_order)).encode(), digest_size=16
        ).hexdigest()

    def __getstate__(self: DeviceMesh) -> dict[str, Any]:
        return saved_state(self)

    def __setstate__(self: DeviceMesh, state: dict[str, Any]) -> None:
        load_state(self, state)

    def __copy__(self: DeviceMesh) -> DeviceMesh:
        """Another mesh with the same root and groups; what users put on it is shared,
        not copied."""
        return copy_mesh(self)

    def __deepcopy__(self: DeviceMesh, memo: dict[int, Any]) -> DeviceMesh:
        """Another mesh of the same universe: views flattened later, and groups, are
        seen by both. Its root is a copy, too, the one that what else is copied with it
        has."""
        return copy_mesh(self, memo)

    # --- views

    def __getitem__(self: DeviceMesh, mesh_dim_names: str | _Names) -> DeviceMesh:
        """The view of these axes, in the mesh's order; flattened views count by their
        names."""
        if not self._mesh_dim_names:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        names = (
            (mesh_dim_names,)
            if isinstance(mesh_dim_names, str)
            else tuple(mesh_dim_names)
        )
        if names == self._mesh_dim_names:
            return self
        return mark_slice(
            make_view(self, ascending(self, names), names, select_groups(self, names)),
            self,
            names,
        )

    def _get_slice_mesh_layout(self: DeviceMesh, mesh_dim_names: _Names) -> Any:
        return to_torch(ascending(self, mesh_dim_names))

    def _create_sub_mesh(
        self: DeviceMesh, layout: Any, submesh_dim_names: _Names
    ) -> DeviceMesh:
        names = submesh_dim_names
        return mark_slice(
            make_view(self, from_torch(layout), names, select_groups(self, names)),
            self,
            names,
        )

    def permute(self: DeviceMesh, mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """The same ranks with the axes in another order, any order; no groups are made.

        Raises:
            ValueError: the names aren't the mesh's own, each once.

        >>> mesh.shape, mesh.permute(("tp", "dp")).shape  # doctest: +SKIP
        ((2, 4), (4, 2))
        """
        if is_traced():
            return traced_view(self, "permute", mesh_dim_names)
        names, own = tuple(mesh_dim_names), self._mesh_dim_names or ()
        if not own or (len(names), {*names}) != (len(own), {*own}):
            raise ValueError(
                f"permute needs each name of the mesh once; it has {own or 'none'}, "
                f"got {names}"
            )
        return make_view(self, select(self, names), names, select_groups(self, names))

    def submesh_at(
        self: DeviceMesh, mesh_dim_names: str | tuple[str, ...], at: Mapping[str, int]
    ) -> DeviceMesh:
        """The view of some axes as it is at given coordinates of the others, in
        constant time.

        Args:
            mesh_dim_names: the axes to show.
            at: the coordinate on other axes of the mesh; this rank's own where not
                given, 0 on a rank outside the mesh.

        Returns:
            A root mesh of its own; its groups are there on the ranks that it holds.

        Raises:
            KeyError: a name that the mesh doesn't have.
            ValueError: an axis shown twice or both shown and fixed, be it inside a
                flattened view, or a coordinate outside its axis.

        What another replica's ranks see:

        >>> mesh.submesh_at("shard", at={"replicate": 1})  # doctest: +SKIP
        """
        if is_traced():
            return traced_view(self, "submesh_at", mesh_dim_names, at)
        names = (
            (mesh_dim_names,)
            if isinstance(mesh_dim_names, str)
            else tuple(mesh_dim_names)
        )
        layout, own = select(self, names), select_groups(self, names)
        start = start_at(self, names, layout, at)
        view = view_of(self).window(layout, start)
        inside = is_initialized() and view.rank_map.index(get_rank()) is not None
        own = own if inside or own is None else []
        return mark_slice(make_window(self, layout, start, names, own), self, names)

    def _get_all_submeshes(self: DeviceMesh, mesh_dim_name: str) -> list[DeviceMesh]:
        """Every copy of one axis over the whole universe, each a root mesh."""
        axis = view_of(self).layout.axes[self._get_mesh_dim_by_name(mesh_dim_name)]
        view = view_of(self).show(_MeshLayout((axis,)))
        names, mine = (
            (mesh_dim_name,),
            view.start(get_rank() if is_initialized() else self._rank),
        )
        own = select_groups(self, names)
        return [
            make_window(
                self,
                view.layout,
                start,
                names,
                own if start == mine or own is None else [],
            )
            for start in view.copies()
        ]

    @cached_property
    def _traced_views(self: DeviceMesh) -> TracedViews:
        """The views that compiled code made, by `_trace_view`'s names; cached, since
        dynamo guards what it finds so."""
        return shared_state(self).traced

    def _trace_view(self: DeviceMesh, method: str, *arguments: Any) -> str:
        return keep_view(self, method, arguments)

    # --- views that need groups

    def _create_flatten_mesh(
        self: DeviceMesh, mesh_dim_name: str, backend_override: Override = (None, None)
    ) -> None:
        """Put the flattened view into the root's mapping, from which `_flatten` takes
        it."""
        root = self._get_root_mesh()
        layout = _MeshLayout((view_of(self).layout.collapse(),))
        if is_flattened(root, mesh_dim_name, layout):
            return
        names, overrides = (mesh_dim_name,), (backend_override,)
        # A mesh without groups whose view can't have one: there is no world, or the
        # mesh is for xla.
        bare = group_names(self) is None and (
            self._device_type == "xla" or not is_initialized()
        )
        groups = None if bare else make_groups(self, layout, names, overrides)
        flattened = make_view(self, layout, names, groups)
        mark_apart(flattened)
        root._flatten_mapping[mesh_dim_name] = flattened
        # The same dict, unless `self` is of a class that forwards to a view, and so is
        # a root with the view's dict.
        shared_state(self).flattened.setdefault(mesh_dim_name, flattened)

    def _create_unflatten_mesh(
        self: DeviceMesh,
        dim: int,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: _Names,
        backend_override: tuple[Override, ...] = ((None, None),),
    ) -> DeviceMesh:
        """One axis as several; the other axes keep their groups."""
        layout, ndim = view_of(self).layout, self.ndim
        if not -ndim <= dim < ndim:
            raise IndexError(
                f"This mesh has {ndim} dims, and dim {dim} isn't one of -{ndim} to "
                f"{ndim - 1}"
            )
        dim %= ndim
        new, names = cut_axis(self, dim, mesh_sizes, mesh_dim_names)
        groups = group_names(self)
        if groups is not None:
            groups = [
                *groups[:dim],
                *make_groups(self, new, mesh_dim_names, backend_override),
                *groups[dim + 1 :],
            ]
        unflattened = make_view(self, layout.splice(dim, dim + 1, new), names, groups)
        if groups is not None:
            mark_apart(unflattened)
            make_joint_groups(unflattened)
        return unflattened

    @staticmethod
    def _concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """The axes of several views of one universe side by side; no groups are
        made."""
        if not device_mesh_list:
            raise ValueError("concatenate needs at least one mesh, got an empty list")
        layout = side_by_side(device_mesh_list)
        names = [
            name for mesh in device_mesh_list for name in mesh._mesh_dim_names or ()
        ]
        held = [group_names(mesh) for mesh in device_mesh_list]
        groups = (
            None
            if None in held
            else [name for names_of_one in held for name in names_of_one or ()]
        )
        concatenated = make_view(device_mesh_list[0], layout, names, groups)
        mark_beside(concatenated, device_mesh_list)
        return concatenated

    @staticmethod
    def concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """The axes of several views of one root mesh side by side, in the order given;
        no groups are made.

        Args:
            device_mesh_list: views that have no axis in common.

        Raises:
            ValueError: an empty list.
            RuntimeError: views of different ranks, axes that overlap, or names on some
                axes only.
        """
        if is_traced() and device_mesh_list:
            return device_mesh_list[0]._beside(device_mesh_list)
        return DeviceMesh._concatenate(device_mesh_list)

    def _beside(self: DeviceMesh, device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """`concatenate` as a method of the first mesh: these are what a compiled graph
        may call."""
        if is_traced():
            return traced_view(self, "_beside", device_mesh_list)
        return DeviceMesh._concatenate([real_mesh(mesh) for mesh in device_mesh_list])

    def flatten(
        self: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Any = None
    ) -> DeviceMesh:
        """All axes as one. Makes its group, unless the root has this view already, so
        all ranks of the root mesh must call this, or all ranks of the world where
        members can't make groups alone.

        Args:
            mesh_dim_name: what the root and its views call it from then on; the names
                joined with "_" unless given.
            backend_override: the backend of its group, or options, or both.

        Raises:
            RuntimeError: a mesh whose axes have no names.
            ValueError: a name that an axis has, or a flattened view of other axes.
        """
        return self._flatten(mesh_dim_name, backend_override)

    def unflatten(
        self: DeviceMesh,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """One axis as several. Makes their groups, so all ranks of the root mesh must
        call this (in compiled code: compile it), or all ranks of the world where
        members can't make groups alone.

        Args:
            dim: the axis, by number or name.
            mesh_sizes: of the new axes; their product is the size of the old one.
            mesh_dim_names: of the new axes.
            backend_override: the backends of their groups, or options, by number or
                name.

        Raises:
            RuntimeError: not one name for each size.
            ValueError: no such axis, sizes with another product, or a name that another
                axis has.
        """
        if is_traced():
            return traced_view(
                self, "unflatten", dim, mesh_sizes, mesh_dim_names, backend_override
            )
        return self._unflatten(
            dim_of(self, dim), mesh_sizes, mesh_dim_names, backend_override
        )

    # --- groups

    @staticmethod
    def _init_one_process_group(
        sub_layout: Any,
        rank_map: Any,
        dim_name: str,
        backend_override: Override,
        preserve_rank_order: bool = False,
    ) -> str | None:
        view = View(
            RankMap(rank_map.tolist()), _MeshLayout((axis_from_torch(sub_layout),))
        )
        request = Request(view, str(dim_name), backend_override, "cpu")
        return getattr(
            axis_group(current_world().open_universe(view.rank_map), request),
            "group_name",
            None,
        )

    def get_group(self: DeviceMesh, mesh_dim: int | str | None = None) -> ProcessGroup:
        """This rank's group on one axis, by number or name: of the mesh's own axes,
        then of flattened views."""
        # dynamo inlines this: use only members that it may read
        if not hasattr(self, "_dim_group_names"):
            raise RuntimeError("DeviceMesh process groups not initialized!")
        if self.ndim == 0 and mesh_dim is None:
            raise RuntimeError("A mesh without dims has no process group")
        if self.ndim > 1 and mesh_dim is None:
            raise RuntimeError(
                f"Found the DeviceMesh have {self.ndim} dimensions",
                "Optional kwarg `mesh_dim` needs to be specified when "
                "device_mesh.ndim > 1.",
                "If you want to get the list of all the ProcessGroups in the "
                "DeviceMesh,"
                "please use `get_all_groups()` instead.",
            )
        owner, dim = self, 0 if mesh_dim is None else mesh_dim
        if mesh_dim is not None and not isinstance(mesh_dim, int):
            flattened = self._get_root_mesh()._flatten_mapping
            if mesh_dim in flattened and mesh_dim not in (self._mesh_dim_names or ()):
                owner, dim = flattened[mesh_dim], 0
            elif isinstance(mesh_dim, str):
                dim = self._get_mesh_dim_by_name(mesh_dim)
        if not isinstance(dim, int):
            raise AssertionError(f"mesh_dim must be an int, got {type(mesh_dim)}")
        if not (names := owner._dim_group_names) and self._coordinate_on_dim is None:
            raise RuntimeError(
                f"Rank {self.get_rank()} isn't in the mesh {self}, so it has no "
                "process group there. Ask "
                "get_coordinate() first: it is None on ranks outside the mesh."
            )
        return group_by_name(owner, names[dim], mesh_dim, dim)

    def abort(self: DeviceMesh) -> None:
        """Abort every group of this mesh and its views, for ranks whose peers died;
        call it on the root mesh."""
        # its groups are its parent's
        if self._root_mesh is not None or isinstance(view_of(self).rank_map, Window):
            raise RuntimeError(
                "abort() is not supported on a submesh. Call abort() on the root mesh "
                "instead."
            )
        abort_groups(self)


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: _Names | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """A row-major mesh over ranks 0 to the product of the sizes; holds nothing that
    grows with the world."""
    check_names(mesh_shape, mesh_dim_names)
    overrides = None
    if backend_override is not None:
        overrides = normalize_overrides(
            backend_override, len(mesh_shape), mesh_dim_names
        )
    check_device_type(device_type)
    layout = _MeshLayout.from_sizes_strides(read_sizes(mesh_shape))
    ranks = RankMap.identity(layout.numel())
    return DeviceMesh(
        device_type,
        _layout=layout,
        _rank_map=ranks,
        mesh_dim_names=mesh_dim_names,
        backend_override=overrides,
    )


def _normalize_backend_override(
    backend_override: Mapping[Any, Any], ndim: int, mesh_dim_names: _Names | None = None
) -> Iterator[Override]:
    """One (backend, options) an axis, from a dict by number or name; the caller's dict
    stays as it is."""
    return iter(normalize_overrides(backend_override, ndim, mesh_dim_names))


def _maybe_traced_group(mesh: DeviceMesh, mesh_dim: int) -> ProcessGroup | None:
    """The group as a value of the graph that is being traced on one rank for all;
    before 2.14 there is none."""
    return None
