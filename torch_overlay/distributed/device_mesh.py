"""Methods of DeviceMesh, and functions of its module, under the names that they
replace.

Start at `_DeviceMesh.__init__`: it reads the layout and the rank map, joins the state
that a root mesh shares with its views, and makes the process groups. The arithmetic is
in `_mesh_layout.py` and `_mesh/rank_map.py`, the groups are in `_mesh/groups.py`, and
everything below is a short door to one of these.

`_DeviceMesh` is never instantiated. Its attributes are set on DeviceMesh, which stays
the same class object. Methods that aren't listed here (``size``, ``shape``,
``get_coordinate``, ``get_local_rank``, ``from_group``, ``_flatten`` ...) keep their
code and read the attributes that `__init__` sets. Error messages stay as they were,
since callers match them.
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
from ._mesh.caches import (
    forget_shardings_of_equal_root,
    is_traced,
    keep_view,
    real_mesh,
    traced_view,
)
from ._mesh.groups import (
    Request,
    abort_groups,
    axis_group,
    group_by_name,
    make_groups,
    make_joint_groups,
    make_own_groups,
)
from ._mesh.pickling import RankAttribute, load_state, saved_state
from ._mesh.rank_map import RankMap, View, Window
from ._mesh.state import (
    check_in_world,
    copy_mesh,
    group_names,
    join_state,
    make_view,
    make_window,
    private_group_key,
    read_view,
    shared_state,
    thread_id,
    view_of,
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
    """Carries the methods. Its attributes are set on DeviceMesh itself."""

    # Meshes pickled before this attribute existed lack it.
    _preserve_rank_order = False
    # Descriptors, for meshes that were unpickled before there was a world: what such a
    # mesh stored is about the rank that saved it. All other meshes store the attribute,
    # and Python reads that first.
    _rank: int = RankAttribute()  # type: ignore[assignment]
    _coordinate_on_dim: Any = RankAttribute()
    _dim_group_names: list[str] = RankAttribute()  # type: ignore[assignment]

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
        """Make a mesh over these ranks, and its process groups.

        Collective: all ranks of the mesh call it, or all ranks of the world where the
        backend doesn't let members make a group alone. Makes the default group if there
        is none.

        Args:
            mesh: the ranks, as a tensor, array or nested list.
            backend_override: one (backend, options) for each mesh dim.
            _init_backend: False for a mesh without groups.
            _rank: this rank; that of the default group if not given.
            _layout, _rank_map: given together in place of ``mesh``.
            _root_mesh: the mesh that this one is a view of.

        Raises:
            TypeError: there are no ranks, or they are given in both ways.
            ValueError: a rank is wrong or occurs twice, or the world lacks it; or there
                isn't one name, or one override, for each mesh dim.
            RuntimeError: the world has fewer ranks, or a group couldn't be made.
        """
        torch._C._log_api_usage_once(
            "torch.distributed.device_mesh.DeviceMesh.__init__"
        )
        view = read_view(mesh, _layout, _rank_map)
        overrides = read_overrides(backend_override, len(view.layout.axes))
        self._mesh_dim_names = read_names(mesh_dim_names, len(view.layout.axes))
        shared = join_state(self, view, _root_mesh)  # sets _layout, _in_universe
        # Caches of sharding results hold meshes by value. A loop that builds an equal
        # mesh each time would otherwise keep every one of them, and its groups, alive.
        if _root_mesh is None:
            forget_shardings_of_equal_root(shared)
        self._device_type = device_type
        self._root_mesh = None if _root_mesh is None else _root_mesh._get_root_mesh()
        self._preserve_rank_order = preserve_rank_order
        # A view starts with empty ones: flattened views and groups are looked up
        # through its root.
        self._flatten_mapping = shared.flattened if _root_mesh is None else {}
        self._pg_registry = shared.registry if _root_mesh is None else {}
        self._thread_id = None
        self._hash: int | None = None
        if device_type == "xla":
            return  # no groups on XLA, and neither rank nor coordinates
        if _init_backend:
            # Makes the default group if there is none, so only now is there a world
            # against which the ranks can be checked.
            self._setup_world_group_and_device()
            check_in_world(shared.rank_map)
            make_own_groups(self, overrides)
        self._thread_id = thread_id()
        self._rank = get_rank() if _rank is None else _rank
        self._coordinate_on_dim = self._compute_coordinate_on_dim()

    # --- attributes that are computed when they are first read

    @cached_property
    def _rank_map(self: DeviceMesh) -> torch.Tensor:
        """The rank at each index, as a tensor of one dimension (int32, on the CPU),
        built once for a root mesh and all its views. A cached_property, since
        subclasses that skip `__init__` assign it; with a view, that changes `mesh`, not
        coordinates."""
        return shared_state(self).tensor

    @cached_property
    def _flatten_rank_map(self: DeviceMesh) -> tuple[int, ...]:
        """The ranks of `_rank_map`, as a tuple."""
        return shared_state(self).ranks

    @property
    def mesh(self: DeviceMesh) -> torch.Tensor:
        """The ranks as a tensor of the mesh's shape, int32 on the CPU. A rank outside
        the mesh sees the first copy.

        Wherever strides can express it, this is a view of the one rank map tensor that
        the root mesh shares with all its views, so it costs the same for a million
        ranks as for eight.
        """
        view = view_of(self)
        # An XLA mesh has no _rank. No universe holds rank -1, so it shows the first
        # copy.
        rank = get_rank() if is_initialized() else getattr(self, "_rank", -1)
        # Callers read numbers from it, also under FakeTensorMode, torch.device("meta")
        # and while tracing.
        with _disable_current_modes():
            return shared_state(self).shown(view.layout, view.start(rank))

    def _compute_coordinate_on_dim(self: DeviceMesh) -> tuple[int, ...] | None:
        """This rank's coordinates, None outside the mesh. The mesh must have its
        rank."""
        return view_of(self).coordinate(self._rank)

    # --- equality, hash and pickling

    def _hash_key(self: DeviceMesh) -> tuple[Any, ...]:
        """What makes two meshes equal, the tokens of private groups included."""
        view, names = view_of(self), self._mesh_dim_names
        return (
            view.rank_map.key,
            view.layout,
            self._device_type,
            names,
            self._thread_id,
            # Two meshes made alike, one of them inside private_groups(), must not be
            # equal: a cache would run a collective of one on the groups of the other.
            *private_group_key(self),
        )

    def __eq__(self: DeviceMesh, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return False
        # Dynamo compares a mesh with the wrapper that stands for one in a graph.
        mesh = real_mesh(other)
        return (
            self._hash_key() == mesh._hash_key()
            and self._preserve_rank_order == mesh._preserve_rank_order
        )

    def _stable_hash(self: DeviceMesh) -> str:
        """A hash that is the same in every process, for caches of compiled code. `hash`
        isn't: Python seeds it per process for strings."""
        return hashlib.blake2b(
            repr((self._hash_key(), self._preserve_rank_order)).encode(), digest_size=16
        ).hexdigest()

    def __getstate__(self: DeviceMesh) -> dict[str, Any]:
        return saved_state(self)

    def __setstate__(self: DeviceMesh, state: dict[str, Any]) -> None:
        load_state(self, state)

    def __copy__(self: DeviceMesh) -> DeviceMesh:
        """A second mesh with the same root and the same process groups. Attributes that
        users set on the mesh are shared, not copied."""
        return copy_mesh(self)

    def __deepcopy__(self: DeviceMesh, memo: dict[int, Any]) -> DeviceMesh:
        """A second mesh of the same universe: both see views that are flattened later,
        and both use the same process groups, which can't be copied.

        The root mesh is copied, too. Other meshes that are copied in the same call,
        with this ``memo``, share that copy of the root.
        """
        return copy_mesh(self, memo)

    # --- views, which make no groups

    def __getitem__(self: DeviceMesh, mesh_dim_names: str | _Names) -> DeviceMesh:
        """Slice the mesh: the view of these mesh dims. They must be in the mesh's
        order. A flattened view counts as a mesh dim under its name. All names in order
        give the mesh itself.

        Raises:
            RuntimeError: the mesh has no names, or two of the mesh dims share ranks.
            KeyError: there is no such name, or the names are in another order.
        """
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
        """The layout of a slice, in the form of ``_layout``."""
        return to_torch(ascending(self, mesh_dim_names))

    def _create_sub_mesh(
        self: DeviceMesh, layout: Any, submesh_dim_names: _Names
    ) -> DeviceMesh:
        """The slice with this layout and these names."""
        names = submesh_dim_names
        return mark_slice(
            make_view(self, from_torch(layout), names, select_groups(self, names)),
            self,
            names,
        )

    def permute(self: DeviceMesh, mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """The same ranks with the mesh dims in the given order. Makes no groups.

        Raises:
            ValueError: ``mesh_dim_names`` isn't each name of the mesh exactly once.

        >>> mesh.shape, mesh.permute(("tp", "dp")).shape  # doctest: +SKIP
        ((2, 4), (4, 2))
        """
        # Dynamo can't construct a mesh, so compiled code gets the view as an attribute.
        if is_traced():
            return traced_view(self, "permute", mesh_dim_names)
        names = tuple(mesh_dim_names)
        mesh_names = self._mesh_dim_names or ()
        if not mesh_names or (len(names), {*names}) != (len(mesh_names), {*mesh_names}):
            raise ValueError(
                "permute needs each name of the mesh once; it has "
                f"{mesh_names or 'none'}, got {names}"
            )
        return make_view(self, select(self, names), names, select_groups(self, names))

    def submesh_at(
        self: DeviceMesh, mesh_dim_names: str | tuple[str, ...], at: Mapping[str, int]
    ) -> DeviceMesh:
        """Slice the mesh at given coordinates of the other mesh dims, in constant time.
        `mesh[...]` slices at this rank's own coordinates.

        Args:
            mesh_dim_names: the mesh dims to show.
            at: coordinates on other mesh dims, by name. A mesh dim that isn't named is
                taken at this rank's own coordinate, or at 0 on a rank outside the mesh.

        Returns:
            A root mesh. It has process groups on the ranks that it holds, and none on
            other ranks.

        Raises:
            KeyError: the mesh has no mesh dim of this name.
            ValueError: a mesh dim is shown twice, or is both shown and fixed, directly
                or as part of a flattened view; or a coordinate is outside its mesh dim.

        The ranks of another replica:

        >>> mesh.submesh_at("shard", at={"replicate": 1})  # doctest: +SKIP
        """
        if is_traced():
            return traced_view(self, "submesh_at", mesh_dim_names, at)
        names = (
            (mesh_dim_names,)
            if isinstance(mesh_dim_names, str)
            else tuple(mesh_dim_names)
        )
        layout = select(self, names)
        groups = select_groups(self, names)
        start = start_at(self, names, layout, at)
        view = view_of(self).window(layout, start)
        inside = is_initialized() and view.rank_map.index(get_rank()) is not None
        # The groups found above are those through this rank. If the submesh is that of
        # other ranks, they aren't its groups.
        groups = groups if inside or groups is None else []
        return mark_slice(make_window(self, layout, start, names, groups), self, names)

    def _get_all_submeshes(self: DeviceMesh, mesh_dim_name: str) -> list[DeviceMesh]:
        """Every copy of one mesh dim over the whole universe, each as a root mesh. Only
        the copy that holds this rank has a process group."""
        axis = view_of(self).layout.axes[self._get_mesh_dim_by_name(mesh_dim_name)]
        view = view_of(self).with_layout(_MeshLayout((axis,)))
        names = (mesh_dim_name,)
        own_start = view.start(get_rank() if is_initialized() else self._rank)
        groups = select_groups(self, names)
        return [
            make_window(
                self,
                view.layout,
                start,
                names,
                groups if start == own_start or groups is None else [],
            )
            for start in view.copies()
        ]

    @cached_property
    def _traced_views(self: DeviceMesh) -> TracedViews:
        """The views that compiled code asked for, by the names of `_trace_view`, cached
        in ``__dict__``, where dynamo guards them."""
        return shared_state(self).traced

    def _trace_view(self: DeviceMesh, method: str, *arguments: Any) -> str:
        """Keep the view of ``method``, and return its name in `_traced_views`, while
        code is compiled. Collective if the method makes groups."""
        return keep_view(self, method, arguments)

    # --- views that need groups

    def _create_flatten_mesh(
        self: DeviceMesh, mesh_dim_name: str, backend_override: Override = (None, None)
    ) -> None:
        """Flatten the mesh and register the view in the root's ``_flatten_mapping``,
        once. Collective, as `flatten` is."""
        root = self._get_root_mesh()
        layout = _MeshLayout((view_of(self).layout.collapse(),))
        if is_flattened(root, mesh_dim_name, layout):
            return
        names, overrides = (mesh_dim_name,), (backend_override,)
        # A mesh that was made without groups (_init_backend=False) can be flattened
        # where no group can be made: before init_process_group, and on XLA.
        without_groups = group_names(self) is None and (
            self._device_type == "xla" or not is_initialized()
        )
        groups = None if without_groups else make_groups(self, layout, names, overrides)
        flattened = make_view(self, layout, names, groups)
        mark_apart(flattened)
        root._flatten_mapping[mesh_dim_name] = flattened
        # This is the same dict, except for a subclass that forwards to a view by
        # `__getattr__`: such a mesh is its own root, but shares the view's state.
        shared_state(self).flattened.setdefault(mesh_dim_name, flattened)

    def _create_unflatten_mesh(
        self: DeviceMesh,
        dim: int,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: _Names,
        backend_override: tuple[Override, ...] = ((None, None),),
    ) -> DeviceMesh:
        """Replace one mesh dim by several, whose groups are made. Collective."""
        layout, ndim = view_of(self).layout, self.ndim
        if not -ndim <= dim < ndim:
            raise IndexError(
                f"This mesh has {ndim} dims, and dim {dim} isn't one of -{ndim} to "
                f"{ndim - 1}"
            )
        dim %= ndim
        new_axes, names = cut_axis(self, dim, mesh_sizes, mesh_dim_names)
        groups = group_names(self)
        if groups is not None:
            groups = [
                *groups[:dim],
                *make_groups(self, new_axes, mesh_dim_names, backend_override),
                *groups[dim + 1 :],
            ]
        unflattened = make_view(
            self, layout.splice(dim, dim + 1, new_axes), names, groups
        )
        if groups is not None:
            mark_apart(unflattened)
            make_joint_groups(unflattened)
        return unflattened

    @staticmethod
    def _concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """The mesh dims of several views of one universe, in the order given."""
        if not device_mesh_list:
            raise ValueError("concatenate needs at least one mesh, got an empty list")
        layout = side_by_side(device_mesh_list)
        names = [
            name for mesh in device_mesh_list for name in mesh._mesh_dim_names or ()
        ]
        groups_of_views = [group_names(mesh) for mesh in device_mesh_list]
        # One view without a backend leaves the mesh dims half with groups, half
        # without: then the mesh counts as one that was made without.
        groups = (
            None
            if None in groups_of_views
            else [name for view_groups in groups_of_views for name in view_groups or ()]
        )
        concatenated = make_view(device_mesh_list[0], layout, names, groups)
        mark_beside(concatenated, device_mesh_list)
        return concatenated

    @staticmethod
    def concatenate(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """The mesh dims of several views of one root mesh, in the order given. Makes no
        groups. If one view was made without groups, the result has none.

        Args:
            device_mesh_list: views that have no mesh dim in common.

        Raises:
            ValueError: the list is empty.
            RuntimeError: the views are of different root meshes, their mesh dims
                overlap, or only some of them have names or ``preserve_rank_order``.
        """
        if is_traced() and device_mesh_list:
            return device_mesh_list[0]._beside(device_mesh_list)
        return DeviceMesh._concatenate(device_mesh_list)

    def _beside(self: DeviceMesh, device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        """`concatenate` as a method, which a compiled graph can call."""
        if is_traced():
            return traced_view(self, "_beside", device_mesh_list)
        return DeviceMesh._concatenate([real_mesh(mesh) for mesh in device_mesh_list])

    def flatten(
        self: DeviceMesh, mesh_dim_name: str | None = None, backend_override: Any = None
    ) -> DeviceMesh:
        """All mesh dims as one.

        Collective: it makes the group of the new mesh dim, unless the root has this
        view already. So all ranks of the root mesh must call it, or all ranks of the
        world where the backend doesn't let members make a group alone.

        Args:
            mesh_dim_name: the name by which the root mesh and its views know the
                flattened view from then on. The default joins the names with "_".
            backend_override: the backend of its group, or its options, or a pair of
                both.

        Raises:
            RuntimeError: the mesh dims have no names, or the group couldn't be made.
            ValueError: the name belongs to a mesh dim, or to a flattened view of other
                mesh dims.
        """
        return self._flatten(mesh_dim_name, backend_override)

    def unflatten(
        self: DeviceMesh,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """One mesh dim as several.

        Collective: it makes the groups of the new mesh dims. So all ranks of the root
        mesh must call it (in compiled code: compile it), or all ranks of the world
        where the backend doesn't let members make a group alone.

        Args:
            dim: the mesh dim, by number or name.
            mesh_sizes: sizes of the new mesh dims. Their product is the size of
                ``dim``.
            mesh_dim_names: names of the new mesh dims.
            backend_override: backends of their groups, or options, by number or name.

        Raises:
            RuntimeError: there isn't one name for each size, or a group couldn't be
                made.
            ValueError: there is no such mesh dim, the sizes have another product,
                another mesh dim has one of the names, or the other mesh dims have no
                names.
            IndexError: ``dim`` is a negative number that the mesh doesn't have.
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
        """The name of this rank's group on one axis, for callers of this older private
        method. Each call opens a universe of its own. Collective, as `axis_group`."""
        view = View(
            RankMap(rank_map.tolist()), _MeshLayout((axis_from_torch(sub_layout),))
        )
        # This signature has no device type. With "cpu", an axis over the whole world
        # gets the default group on every backend.
        request = Request(view, str(dim_name), backend_override, "cpu")
        group = axis_group(current_world().open_universe(view.rank_map), request)
        return getattr(group, "group_name", None)

    def get_group(self: DeviceMesh, mesh_dim: int | str | None = None) -> ProcessGroup:
        """This rank's process group on one mesh dim, given by number or name. A name is
        looked up among the mesh's dims first, then among the flattened views. A mesh of
        one dim needs no ``mesh_dim``.

        Raises:
            RuntimeError: the mesh was made without groups, this rank isn't in the mesh,
                ``mesh_dim`` is missing for a mesh of several dims, or the mesh was
                loaded in a process that has no group over these ranks.
            KeyError: neither a mesh dim nor a flattened view has this name.
            IndexError: there is no mesh dim of this number.
            AssertionError: ``mesh_dim`` is neither a number nor a name.
        """
        # Dynamo inlines this method: use only members of a mesh that it can read.
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
        # On a rank outside the list of groups is empty. Without this check such a rank
        # would meet an IndexError that says nothing.
        if not (names := owner._dim_group_names) and self._coordinate_on_dim is None:
            raise RuntimeError(
                f"Rank {self.get_rank()} isn't in the mesh {self}, so it has no "
                "process group there. Ask "
                "get_coordinate() first: it is None on ranks outside the mesh."
            )
        return group_by_name(owner, names[dim], mesh_dim, dim)

    def abort(self: DeviceMesh) -> None:
        """Abort every process group of this mesh and its views, for ranks whose peers
        died. The default group stays.

        Raises:
            RuntimeError: the mesh is a slice of another one, or a result of
                `submesh_at`. Call this on the root mesh. Or an abort failed or didn't
                end within a minute; the groups are removed nevertheless.
        """
        # A submesh uses its parent's groups, and so does a window (`submesh_at`),
        # though it is a root mesh.
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
    """A row-major mesh over ranks 0 to the product of the sizes. It allocates nothing
    that grows with the world: the rank map is the identity, which stores no ranks.

    Collective: it makes the process groups of the mesh, and the default group if there
    is none.

    Args:
        mesh_shape: the size of each mesh dim.
        mesh_dim_names: one for each mesh dim, all different.
        backend_override: the backend of a mesh dim, or its options, or a pair of both,
            by number or name of the mesh dim.

    Raises:
        RuntimeError: the names repeat or aren't as many as the sizes, the device type
            has an index, a key of ``backend_override`` is no mesh dim, the world has
            fewer ranks, or a group couldn't be made.
        TypeError: a value of ``backend_override`` is neither a backend nor options, nor
            a pair of both.
        ValueError: a size isn't a whole number of at least 1.
    """
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
    """One (backend, options) for each mesh dim, from a dict by number or name, which
    isn't changed."""
    return iter(normalize_overrides(backend_override, ndim, mesh_dim_names))


def _maybe_traced_group(mesh: DeviceMesh, mesh_dim: int) -> ProcessGroup | None:
    """The group as a value of the graph where one rank traces for all, from 2.14 on."""
    return None
