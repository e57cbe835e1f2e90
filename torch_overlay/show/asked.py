"""From what a user asks to an explanation: from words on a command line; in a program from a DTensor, from a tree of
them with other placements or on another mesh, or from a `Transfer`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Shard

from ..choices import Choices
from ..distributed._mesh.caches import real_mesh
from ..distributed._torch import from_torch
from ..distributed.tensor._planner.cost import Cost
from ..distributed.tensor._planner.regions import NotPlanned
from ..distributed.tensor._runner.at_hand import joint_axes
from ..distributed.tensor._runner.question import why_not
from ..distributed.tensor._runner.specs import read_cuts
from ..overlay import is_enabled, options
from ..transfer import Transfer
from ..transfers._planner.schedule import NOTHING, Flow
from ..transfers.descriptions import Meshes, leaves, target_placements
from ..transfers.mesh_moves import batches, made_like, moves_across, moves_along, ranks_along, read_change
from ..transfers.redistribution import is_pending, reduced_placements
from . import typed
from .explanation import Explanation, JointAxes, Redistribution
from .flow import FlowExplanation
from .plans import explained, to_torch_placement, word_of

if TYPE_CHECKING:
    from ..transfers.descriptions import Placements
    from ..transfers.mesh_moves import Change

Target = tuple[DeviceMesh, "Placements"]


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of this name. Raises ValueError if it has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"--dtype: this torch has no dtype {name!r}")
    return found


def of_anything(
    tensors: Any, placements: Any, device_mesh: DeviceMesh | None, budget: int
) -> Explanation | FlowExplanation:
    """See `torch_overlay.explain`."""
    if isinstance(tensors, Transfer):
        return of_transfer(tensors)
    if device_mesh is not None or isinstance(tensors, (dict, list, tuple)):
        return of_tree(tensors, placements, device_mesh, budget)
    return of_tensor(tensors, placements)


def of_words(
    ends: Sequence[Sequence[typed.Placement]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mesh: typed.Mesh,
    groups: JointAxes,
    cost: Cost,
) -> Explanation:
    """Explain for a mesh of these sizes. Nothing is made."""
    source, target = (tuple(map(to_torch_placement, end)) for end in ends)
    held = typed.held(ends, shape, mesh.sizes)
    question = _redistribution((source, target), shape, dtype, mesh, held, groups, cost)
    return explained(question, source, target)


def of_tensor(tensor: Any, placements: Sequence[Any] | str) -> Explanation:
    """Explain `tensor.redistribute(placements=placements)`, with the groups and options of this process."""
    source = getattr(tensor, "_spec", None)
    if not isinstance(source, DTensorSpec) or source.tensor_meta is None:
        raise TypeError(f"explain() needs a DTensor and placements, got {type(tensor).__name__}")
    mesh = real_mesh(source.mesh)
    target = DTensorSpec(mesh, _placements(placements, mesh, source.ndim), tensor_meta=source.tensor_meta)
    settings = options()
    names = tuple(mesh.mesh_dim_names or typed.names(None, mesh.ndim))
    held, groups = _held(mesh, source, target), _groups(mesh, settings, is_enabled())
    ends = tuple(source.placements), tuple(target.placements)
    shown = typed.Mesh(tuple(mesh.shape), names, tuple(mesh.mesh.flatten().tolist()))
    meta = source.tensor_meta
    question = _redistribution(
        ends, tuple(meta.shape), meta.dtype, shown, held, groups, Cost.of(mesh.device_type), bool(mesh.mesh_dim_names)
    )
    return explained(question, *ends)


def _placements(given: Sequence[Any] | str, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    if isinstance(given, str):
        return tuple(map(to_torch_placement, typed.placements(given, mesh.ndim, ndim)))
    found = tuple(given)
    if len(found) != mesh.ndim or not all(isinstance(placement, Placement) for placement in found):
        raise ValueError(f"explain() needs {mesh.ndim} placements, one for each axis of {mesh}, got {found}")
    return tuple(_positive(placement, ndim) for placement in found)


def _positive(placement: Placement, ndim: int) -> Placement:
    if type(placement) is Shard and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def _redistribution(
    ends: tuple[tuple[Placement, ...], tuple[Placement, ...]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mesh: typed.Mesh,
    held: typed.Held,
    groups: JointAxes,
    cost: Cost,
    named: bool = True,
) -> Redistribution:
    before, after, refused = held
    return Redistribution(
        words=("·".join(map(word_of, ends[0])), "·".join(map(word_of, ends[1]))),
        shape=shape,
        sizes=mesh.sizes,
        source=before,
        target=after,
        refused=refused,
        names=mesh.names,
        ranks=mesh.ranks,
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        groups=groups,
        cost=cost,
        named=named,
    )


def _held(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> typed.Held:
    """What the specs mean to the planner, and why it would not plan, if so."""
    shape, sizes = tuple(source.shape), tuple(mesh.shape)
    try:
        before, after = (
            read_cuts(tuple(spec.placements), spec.shard_order, len(shape), sizes).on(shape, sizes)
            for spec in (source, target)
        )
    except NotPlanned as reason:
        return None, None, str(reason)
    return before, after, why_not(mesh, source, target) or ""


def _groups(mesh: DeviceMesh, settings: Choices, on: bool) -> JointAxes:
    """For which sets of axes the overlay has a group: what it would use now, or, while it is off, what a mesh that is
    made under it would have."""
    policy = "existing" if settings.share_groups == "off" else settings.flatten
    if on:
        return joint_axes(mesh)
    root = mesh._get_root_mesh()
    known = {from_torch(flat._layout).collapse().ascending() for flat in root._flatten_mapping.values()}
    layout = from_torch(mesh._layout)
    if policy == "whole":
        known.add(from_torch(root._layout).collapse().ascending())
    return frozenset(
        subset
        for count in range(2, mesh.ndim + 1)
        for subset in itertools.combinations(range(mesh.ndim), count)
        if layout.select(subset).collapse().ascending() in known
    )


def of_transfer(transfer: Transfer) -> FlowExplanation:
    """Explain what each `run` does. On a rank that has no part in it, too."""
    tensors = transfer._route.tensors
    shapes = [(tensor.source.regions.shape, tensor.wire.itemsize) for tensor in tensors]
    return FlowExplanation(
        len(tensors),
        sum([math.prod(shape) * itemsize for shape, itemsize in shapes]),
        _sorted({rank for tensor in tensors for rank in tensor.source.ranks}),
        _sorted({rank for tensor in tensors for rank in tensor.target.ranks}),
        transfer._route.flow(),
        transfer.budget,
    )


def of_tree(tensors: Any, placements: Any, mesh: DeviceMesh | None, budget: int) -> FlowExplanation:
    """Explain `torch_overlay.redistribute(tensors, mesh, placements, budget=budget)`."""
    found = {name: leaf for name, leaf in leaves(tensors).items() if isinstance(leaf, DTensor)}
    if not found:
        raise TypeError(f"explain() needs DTensors, in dicts, lists and tuples; got none in a {type(tensors).__name__}")
    wanted = target_placements(found, placements, mesh)
    moving = {n: t for n, t in found.items() if (t.device_mesh, t.placements) != wanted[n]}
    across = {name: tensor for name, tensor in moving.items() if wanted[name][0] != tensor.device_mesh}
    flow, alone = _flow_across([*across.values()], [wanted[name] for name in across], budget), 0
    by_mesh: dict[DeviceMesh, dict[int, Change]] = {}
    for number, (name, tensor) in enumerate(moving.items()):
        change = read_change(tensor, wanted[name][1]) if name not in across else None
        if change is not None:
            by_mesh.setdefault(tensor.device_mesh, {})[number] = change
        elif name not in across:
            alone += 1
    for on, changes in by_mesh.items():
        together, others = batches(on, changes)
        alone += len(others)
        for numbers in together:
            flow += _flow_on(on, [changes[number] for number in numbers], budget)
    return FlowExplanation(
        len(found),
        sum([tensor.numel() * tensor.element_size() for tensor in found.values()]),
        _sorted({rank for tensor in found.values() for rank in _members(tensor.device_mesh)}),
        _sorted({rank for onto, _ in wanted.values() for rank in _members(onto)}),
        flow,
        budget,
        alone,
        sum([is_pending(tensor) for tensor in across.values()]),
    )


def _flow_across(tensors: Sequence[DTensor], targets: Sequence[Target], budget: int) -> Flow:
    if not tensors:
        return NOTHING
    # Of what is pending, how it lies when it is reduced; its local tensor isn't looked at.
    settled = [made_like(t, t._local_tensor, t.device_mesh, reduced_placements(t)) for t in tensors]
    return Flow.of(moves_across(settled, targets, Meshes()), budget)


def _flow_on(mesh: DeviceMesh, changes: Sequence[Change], budget: int) -> Flow:
    """Ranks that differ along other axes do the same beside one another."""
    axes = sorted(frozenset().union(*[change.axes for change in changes]))
    others = [range(1) if axis in axes else range(size) for axis, size in enumerate(mesh.shape)]
    found = NOTHING
    for here in itertools.product(*others):
        found = found.beside(Flow.of(moves_along(changes, ranks_along(mesh, axes, here)), budget))
    return found


def _members(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()  # type: ignore[no-any-return]


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))
