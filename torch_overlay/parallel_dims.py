"""Named meshes from degrees of parallelism, which trainers otherwise compute by hand.

`ParallelDims` holds degrees and checks that they fit a world. `ParallelDims.build` makes the meshes of a run, a
`ParallelMeshes`. They are made by torch's mesh calls (``init_device_mesh``, unflatten, flatten, slicing), so this works
on stock torch, too. Under the overlay equal axes of different meshes share a process group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from .distributed._mesh.text import ranks_text
from .show.words import aligned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelDims", "ParallelMeshes"]

# The degrees whose product is the world size, outermost first: tp is innermost, since its ranks talk most, and
# neighbours share a host. Experts may be spread over those of `_REGION`.
_WORLD = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_REGION = ("dp_shard", "cp", "tp")
_EXPERT = ("ep", "etp")

# The axes of each mesh, row-major over all ranks. `LOSS` are those of the data mesh that are joined to the loss mesh.
MESHES = {
    "world": ("world",),
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "sparse": ("pp", "dp_replicate", "efsdp", "ep", "etp"),
    "data": ("pp", "batch", "cp", "tp"),
}
LOSS = ("batch", "cp")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism, each a number of ranks; one of them may be -1, whatever is left.

    Attributes:
        pp: stages of the pipeline.
        dp_replicate: copies of the model that each hold all its shards (DDP, HSDP).
        dp_shard: ranks of one copy that read different data and shard the weights (FSDP).
        cp: ranks that share a sequence; weights are sharded over them too.
        tp: ranks that share each layer.
        ep: ranks that the experts are spread over, out of the ``dp_shard * cp * tp`` of one copy and stage.
        etp: ranks that share each expert.

    ``pp * dp_replicate * dp_shard * cp * tp`` is the world size, and ``ep * etp`` divides ``dp_shard * cp * tp``: it
    may span any part of the three.

    Raises:
        ValueError: a degree is neither -1 nor a whole number from 1 on, or more than one is -1.

    >>> ParallelDims(tp=2, ep=4).fit(16)  # how sixteen ranks are used
    ParallelDims(pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=4, etp=1)
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        degrees = {degree.name: getattr(self, degree.name) for degree in fields(self)}
        for name, degree in degrees.items():
            # A bool is an int for Python, but tp=True is no number of ranks.
            if not isinstance(degree, int) or isinstance(degree, bool) or (degree < 1 and degree != -1):
                raise ValueError(f"{name} must be a number of ranks from 1 on, or -1 for what is left; got {degree!r}")
        open_degrees = [name for name, degree in degrees.items() if degree == -1]
        if len(open_degrees) > 1:
            hint = "; dp_shard is -1 unless you give it" if "dp_shard" in open_degrees else ""
            raise ValueError(f"only one degree can be -1, got {' and '.join(open_degrees)}{hint}")

    def fit(self, world_size: int) -> ParallelDims:
        """Return these degrees with the number of ranks in place of -1 that it stands for in a world of this size.

        Raises:
            ValueError: the degrees don't fit. The message says what was needed, what came, and which degrees would fit.
        """
        if world_size < 1:
            raise ValueError(f"fit() needs the number of ranks, from 1 on; got {world_size}")
        fitted = self._fill(_WORLD, world_size, "the world size", exact=True)
        region = math.prod(fitted._degrees(_REGION).values())
        return fitted._fill(_EXPERT, region, " * ".join(_REGION), exact=False)

    def build(self, device_type: str, *, world_group: bool = True, backend: str | None = None) -> ParallelMeshes:
        """Make the meshes over all ranks of the job; every rank calls it, after ``init_process_group``.

        Args:
            device_type: as ``init_device_mesh`` takes it, such as ``"cuda"``.
            world_group: if True, all meshes are views of a world mesh. Its one axis has a group of all ranks: the
                default group, if that serves the device. If ``init_process_group`` bound an NCCL world to its devices,
                the group of each axis is split from it. If False, each mesh is made by itself, and has only the groups
                of its axes; `ParallelMeshes.world` is None.
            backend: the backend of the axes' groups. By default that of the default group.

        Raises:
            RuntimeError: the job has no default group yet.
            ValueError: the degrees don't fit its size. Errors of torch's mesh calls are passed on, as for a backend
                that torch doesn't know.
        """
        import torch.distributed as dist

        from .mesh_builder import Builder

        if not dist.is_initialized():
            raise RuntimeError("build() needs the ranks of the job: call torch.distributed.init_process_group first")
        fitted = self.fit(dist.get_world_size())
        builder = Builder(device_type, fitted.sizes(), world_group, backend)
        # The order is the same on all ranks: it decides which groups are made when.
        data = builder.mesh(MESHES["data"])
        loss = builder.joined(data[LOSS], "loss")
        dense, sparse = builder.mesh(MESHES["dense"]), builder.mesh(MESHES["sparse"])
        return ParallelMeshes(fitted, builder.world, dense, sparse, data, loss)

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks on each axis, by name. Call `fit` first: it also checks that the degrees fit one
        another.

        Raises:
            ValueError: a degree is -1.
        """
        if -1 in self._degrees(_WORLD + _EXPERT).values():
            raise ValueError(f"sizes() needs every degree, call fit(world_size) first; got {self}")
        return {
            "world": math.prod(self._degrees(_WORLD).values()),
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "fsdp": self.dp_shard * self.cp,
            "tp": self.tp,
            # What ep and etp leave of the region. `fit` has refused those that don't divide it.
            "efsdp": _quotient(math.prod(self._degrees(_REGION).values()), [self.ep, self.etp]) or 0,
            "ep": self.ep,
            "etp": self.etp,
            "batch": self.dp_replicate * self.dp_shard,
            "cp": self.cp,
            "loss": self.dp_replicate * self.dp_shard * self.cp,
        }

    def _degrees(self, names: tuple[str, ...]) -> dict[str, int]:
        return {name: getattr(self, name) for name in names}

    def _fill(self, names: tuple[str, ...], total: int, what: str, exact: bool) -> ParallelDims:
        """Return these degrees with the one of `names` that is -1 inferred from the total."""
        degrees = self._degrees(names)
        open_degree = next((name for name, degree in degrees.items() if degree == -1), None)
        known = {name: degree for name, degree in degrees.items() if degree != -1}
        quotient = _quotient(total, known.values())
        # With a degree of -1 the others need only divide the total; without, their product is the total if `exact`.
        if open_degree and quotient:
            return replace(self, **{open_degree: quotient})
        if not open_degree and (quotient == 1 if exact else quotient):
            return self
        exact = exact and not open_degree
        need = "be" if exact else "divide"
        product = " * ".join(map(str, known.values()))
        product = product if len(known) == 1 else f"{product} = {math.prod(known.values())}"
        reason = f", so that {open_degree}=-1 has a value" if open_degree else ""
        fitting = _fitting(known, total, exact) or "No change of one degree would fit"
        raise ValueError(f"{' * '.join(known)} must {need} {what} ({total}){reason}; got {product}. {fitting}")


@dataclass(frozen=True)
class ParallelMeshes:
    """The meshes of a run, all over the same ranks in the same order, by what they are for.

    Attributes:
        degrees: what they were made from, every degree known.
        world: (world,), all ranks; None if built with ``world_group=False``.
        dense: (pp, dp_replicate, fsdp, tp), where every weight but the experts' lives.
        sparse: (pp, dp_replicate, efsdp, ep, etp), where the experts live.
        data: (pp, batch, cp, tp), who reads what: ranks that differ on batch read different sequences, on cp different
            parts of a sequence.
        loss: (loss,), batch and cp joined: the ranks whose losses make up one mean.

    ``dims["tp"]`` is one axis and ``dims["dp_replicate", "fsdp"]`` several, of whichever mesh has them; an axis of
    degree 1 answers like any other. The same names give the same object.
    """

    degrees: ParallelDims
    world: DeviceMesh | None
    dense: DeviceMesh
    sparse: DeviceMesh
    data: DeviceMesh
    loss: DeviceMesh
    _views: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis name, each once."""
        return tuple(dict.fromkeys(name for mesh in self._meshes().values() for name in _names(mesh)))

    @property
    def enabled(self) -> tuple[str, ...]:
        """The axes that have more than one rank, in the order of `axes`."""
        return tuple(name for name in self.axes if self[name].size() > 1)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the view of one or several axes, in the order of the mesh that has them. The same names give the same
        object.

        Raises:
            KeyError: a name that no mesh has, or names that no mesh has together or in that order; lists those there
                are.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        if names not in self._views:
            self._views[names] = self._view(names)
        return self._views[names]

    def _view(self, names: tuple[str, ...]) -> DeviceMesh:
        """Make a view for `__getitem__`, of the first mesh that has all of these names."""
        unknown = [name for name in names if name not in self.axes]
        if unknown or not names:
            what = ", ".join(map(repr, unknown)) or "asked for"
            raise KeyError(f"no axis {what}; the axes are {', '.join(self.axes)}")
        for mesh in self._meshes().values():
            # The first mesh that has them all: pp and tp are in several, with the same ranks.
            if set(names) <= set(_names(mesh)):
                ordered = tuple(name for name in _names(mesh) if name in names)
                if ordered != names:
                    raise KeyError(f"axes come in the order of their mesh, each once: {ordered}, got {names}")
                return mesh[names]
        axes = "; ".join(f"{what} has {', '.join(_names(mesh))}" for what, mesh in self._meshes().items())
        raise KeyError(f"no mesh has the axes {', '.join(names)} together: {axes}")

    def of(self, *meshes: DeviceMesh) -> DeviceMesh:
        """Return the mesh of this run that has all these views. FSDP needs it if it is combined with tensor or expert
        parallelism.

        A view is a slice of one of the meshes, or some of its axes flattened. Several meshes may have the same view:
        ``pp``, ``dp_replicate`` and ``tp`` have equal ranks in more than one. Then the first of dense, sparse, data and
        world that has all of them is returned.

        Raises:
            ValueError: no mesh of this run has them all, none was given, or one has axes without names.

        >>> dims.of(dims["dp_replicate"], dims["efsdp"]) is dims.sparse  # so experts are sharded here  # doctest: +SKIP
        True
        """
        homes = [mesh for mesh in (self.dense, self.sparse, self.data, self.world) if mesh is not None]
        # By name first: with ep=1, efsdp has the ranks of fsdp * tp, and by ranks alone it would be found in dense.
        for came_from in (self._has_by_name, self._has_joined):
            for home in homes:
                if meshes and all(came_from(home, axis) for mesh in meshes for axis in _each_axis(mesh)):
                    return home
        asked = "; ".join(map(repr, meshes)) or "none"
        raise ValueError(f"of() needs views of one mesh of these dims ({', '.join(self._meshes())}), got {asked}")

    def _has_by_name(self, home: DeviceMesh, axis: DeviceMesh) -> bool:
        """True if `axis`, a named mesh of one axis, is the axis of `home` that has its name."""
        (name,) = _names(axis)
        if home is self.data and name == "loss":
            return axis == self.loss
        return name in _names(home) and home[name] == axis

    def _has_joined(self, home: DeviceMesh, axis: DeviceMesh) -> bool:
        """True if `axis`, a named mesh of one axis, is an axis of `home` by name, or has the ranks of one or several of
        its axes, joined, in the same order and on the same type of device."""
        if self._has_by_name(home, axis):
            return True
        ranks = axis.mesh.tolist()
        for count in range(1, home.ndim + 1):
            for names in itertools.combinations(_names(home), count):
                part = home[names]
                if part.size() == len(ranks) and part.mesh.flatten().tolist() == ranks:
                    return axis.device_type == home.device_type
        return False

    def describe(self) -> str:
        """Return a table of the axes of this run: for each its meshes, its size and stride, and the ranks of this
        rank's group. Its title names this rank and the degrees; its last line counts the groups.

        The stride is the difference between the ranks of neighbours; "-" for an axis of one rank. `shared with` lists
        the axes that have the same group, so their collectives run one after the other. On stock torch only the default
        group is shared, and, by all axes of one rank, a group of this rank alone. Torch's errors are passed on, once
        the process groups are destroyed.
        """
        import torch.distributed as dist

        groups = {name: self[name].get_group().group_name for name in self.axes}
        rows = [("axis", "meshes", "size", "stride", "ranks of this rank's group", "shared with")]
        for name in self.axes:
            homes = [what for what, mesh in self._meshes().items() if name in _names(mesh)]
            size = self[name].size()
            shared = [other for other in self.axes if other != name and groups[other] == groups[name]]
            ranks, stride = self[name].mesh.tolist(), str(self._stride(name)) if size > 1 else "-"
            rows.append((name, ", ".join(homes), str(size), stride, ranks_text(ranks), ", ".join(shared) or "-"))
        degrees = " ".join(f"{degree.name}={getattr(self.degrees, degree.name)}" for degree in fields(self.degrees))
        title = f"rank {dist.get_rank()} of {dist.get_world_size()}: {degrees}"
        count = f"{len(set(groups.values()))} process groups for {len(self.axes)} axes"
        return "\n".join([title, "", *_table(rows), "", count])

    def _stride(self, name: str) -> int:
        """Return the stride of an axis: the product of the sizes of the axes inside it, as the mesh is row-major."""
        home, last = next(
            ((self.data, "cp") if name == "loss" else (mesh, name))
            for mesh in self._meshes().values()
            if name in _names(mesh)
        )
        return math.prod(home.shape[_names(home).index(last) + 1 :])

    def _meshes(self) -> dict[str, DeviceMesh]:
        """Return the meshes by their attribute names, in the order in which names of axes are looked up."""
        named = {what: getattr(self, what) for what in ("world", "dense", "sparse", "data", "loss")}
        return {what: mesh for what, mesh in named.items() if mesh is not None}


def _quotient(total: int, factors: Any) -> int | None:
    """Return the total divided by the product of these factors. None if that isn't a whole number."""
    quotient, remainder = divmod(total, math.prod(factors))
    return None if remainder else quotient


def _fitting(degrees: dict[str, int], total: int, exact: bool) -> str:
    """Return changes of one degree that would make the product fit the total, as a sentence."""
    changes = []
    for name in degrees:
        largest = _quotient(total, [degree for other, degree in degrees.items() if other != name])
        if largest and exact:
            changes.append(f"{name}={largest}")
        elif largest and degrees[name] > 1:
            values = ", ".join(str(value) for value in range(1, largest + 1) if largest % value == 0)
            changes.append(f"{name} out of {values}")
    return f"Would fit: {'; '.join(changes)}" if changes else ""


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _each_axis(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Return an iterator over the axes of a mesh, each as a mesh of one axis."""
    if not _names(mesh):
        raise ValueError(f"of() needs meshes with names, got {mesh!r}")
    return (mesh[name] for name in _names(mesh))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a table as lines: columns as wide as their widest cell, a rule under the first row."""
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return aligned([rows[0], rule, *rows[1:]])
