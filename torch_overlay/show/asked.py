"""Makes explanations for what a user asks about: text of a command line, a DTensor, a tree of them, a `Transfer`.

Start at `of_anything`, which is `torch_overlay.explain`.
"""

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
from ..distributed._mesh_layout import _FlatLayout
from ..distributed._torch import from_torch
from ..distributed.tensor._planner.cost import Cost
from ..distributed.tensor._planner.regions import NotPlanned
from ..distributed.tensor._runner.at_hand import joint_axes
from ..distributed.tensor._runner.question import why_not
from ..distributed.tensor._runner.specs import read_cuts
from ..overlay import is_enabled, options
from ..transfer import Transfer
from ..transfers._planner.schedule import NOTHING, Flow
from ..transfers.mesh_moves import batches, dtensor_like, moves_across, moves_along, ranks_along, read_change
from ..transfers.redistribution import has_several_boxes, is_pending, reduced_placements
from ..transfers.sharding import Meshes
from ..transfers.trees import leaves, target_placements
from . import typed
from .explanation import Explanation
from .flow import FlowExplanation
from .plans import explained, to_torch_placement, word_of
from .shown_plan import JointAxes, Redistribution
from .stock import spec_on

if TYPE_CHECKING:
    from ..transfers.mesh_moves import Change
    from ..transfers.trees import Placements

Target = tuple[DeviceMesh, "Placements"]


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype: this torch has no dtype {name!r}")
    return dtype


def of_anything(
    tensors: Any, placements: Any, device_mesh: DeviceMesh | None, budget: int
) -> Explanation | FlowExplanation:
    """See `torch_overlay.explain`. Raises as `of_transfer`, `of_tree` and `of_tensor` do, by what is given."""
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
    flattened: JointAxes,
    device: str = "cuda",
) -> Explanation:
    """Explain a redistribution that was typed on a command line. No process group is made."""
    source, target = (tuple(map(to_torch_placement, end)) for end in ends)
    regions = typed.regions_of_ends(ends, shape, mesh.sizes)
    question = _redistribution((source, target), shape, dtype, mesh, regions, groups, cost)
    before, after = (spec_on(mesh, end, shape, dtype, device) for end in (source, target))
    return explained(question, before, after, flattened)


def of_tensor(tensor: Any, placements: Sequence[Any] | str) -> Explanation:
    """Explain `tensor.redistribute(placements=placements)`, with the groups and options of this process. Nothing
    communicates."""
    source = getattr(tensor, "_spec", None)
    if not isinstance(source, DTensorSpec) or source.tensor_meta is None:
        raise TypeError(f"explain() needs a DTensor and placements, got {type(tensor).__name__}")
    mesh = real_mesh(source.mesh)
    target = DTensorSpec(mesh, _placements(placements, mesh, source.ndim), tensor_meta=source.tensor_meta)
    chosen = options()
    names = tuple(mesh.mesh_dim_names or typed.parse_names(None, mesh.ndim))
    regions, groups = _regions(mesh, source, target), _groups(mesh, chosen, is_enabled())
    ends = tuple(source.placements), tuple(target.placements)
    plain_mesh = typed.Mesh(tuple(mesh.shape), names, tuple(mesh.mesh.flatten().tolist()))
    meta, cost = source.tensor_meta, Cost.of(mesh.device_type)
    named = bool(mesh.mesh_dim_names)
    question = _redistribution(ends, tuple(meta.shape), meta.dtype, plain_mesh, regions, groups, cost, named)
    return explained(question, source, target, _axes_in(mesh, _flattened(mesh)))


def _placements(placements: Sequence[Any] | str, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    if isinstance(placements, str):
        return tuple(map(to_torch_placement, typed.parse_placements(placements, mesh.ndim, ndim)))
    placements = tuple(placements)
    if len(placements) != mesh.ndim or not all(isinstance(placement, Placement) for placement in placements):
        raise ValueError(f"explain() needs {mesh.ndim} placements, one for each axis of {mesh}, got {placements}")
    return tuple(Shard(p.dim + ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)


def _redistribution(
    ends: tuple[tuple[Placement, ...], tuple[Placement, ...]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mesh: typed.Mesh,
    regions: typed.RegionsOrReason,
    groups: JointAxes,
    cost: Cost,
    named: bool = True,
) -> Redistribution:
    before, after, refused = regions
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


def _regions(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> typed.RegionsOrReason:
    """The regions of both specs, and why torch's own steps run, if so; None if there are none."""
    shape, sizes = tuple(source.shape), tuple(mesh.shape)
    try:
        before, after = (
            read_cuts(tuple(spec.placements), spec.shard_order, len(shape), sizes).on(shape, sizes)
            for spec in (source, target)
        )
    except NotPlanned as reason:
        return None, None, str(reason)
    return before, after, why_not(mesh, source, target) or ""


def _groups(mesh: DeviceMesh, chosen: Choices, on: bool) -> JointAxes:
    policy = "existing" if chosen.share_groups == "off" else chosen.flatten
    if on:
        return joint_axes(mesh)
    known = _flattened(mesh)
    if policy == "whole":
        known.add(from_torch(mesh._get_root_mesh()._layout).collapse().ascending())
    return _axes_in(mesh, known)


def _flattened(mesh: DeviceMesh) -> set[_FlatLayout]:
    """The views that the program flattened. Layouts are ascending: a group is found by its ranks in any order."""
    views = mesh._get_root_mesh()._flatten_mapping.values()
    return {from_torch(view._layout).collapse().ascending() for view in views}


def _axes_in(mesh: DeviceMesh, known: set[_FlatLayout]) -> frozenset[tuple[int, ...]]:
    """The sets of axes whose layout is known."""
    layout = from_torch(mesh._layout)
    return frozenset(
        subset
        for count in range(2, mesh.ndim + 1)
        for subset in itertools.combinations(range(mesh.ndim), count)
        if layout.select(subset).collapse().ascending() in known
    )


def of_transfer(transfer: Transfer) -> FlowExplanation:
    """Explain what each `run` of a Transfer does. Works on a rank that neither sends nor receives, too."""
    tensors = transfer._state.agreement.tensors
    shapes = [(tensor.source.regions.shape, tensor.wire.itemsize) for tensor in tensors]
    return FlowExplanation(
        len(tensors),
        sum([math.prod(shape) * itemsize for shape, itemsize in shapes]),
        _sorted({rank for tensor in tensors for rank in tensor.source.ranks}),
        _sorted({rank for tensor in tensors for rank in tensor.target.ranks}),
        transfer._flow(),
        transfer.budget,
        hosts=transfer._state.agreement.hosts,
        way=transfer._state.agreement.why,
    )


def of_tree(tensors: Any, placements: Any, mesh: DeviceMesh | None, budget: int) -> FlowExplanation:
    """Explain `torch_overlay.redistribute(tensors, mesh, placements, budget=budget)`, without running it."""
    dtensors = {name: leaf for name, leaf in leaves(tensors).items() if isinstance(leaf, DTensor)}
    if not dtensors:
        raise TypeError(f"explain() needs DTensors, in dicts, lists and tuples; got none in a {type(tensors).__name__}")
    targets = target_placements(dtensors, placements, mesh)
    # A tensor that has its placements already costs nothing, and stays out of the plan.
    moving = {n: t for n, t in dtensors.items() if (t.device_mesh, t.placements) != targets[n]}
    onto_others = {name: tensor for name, tensor in moving.items() if targets[name][0] != tensor.device_mesh}
    across = {name: tensor for name, tensor in onto_others.items() if not has_several_boxes(tensor, *targets[name])}
    flow = _flow_across([*across.values()], [targets[name] for name in across], budget)
    alone = len(onto_others) - len(across)
    by_mesh: dict[DeviceMesh, dict[int, Change]] = {}
    for number, (name, tensor) in enumerate(moving.items()):
        change = read_change(tensor, targets[name][1]) if name not in onto_others else None
        if change is not None:
            by_mesh.setdefault(tensor.device_mesh, {})[number] = change
        elif name not in onto_others:
            alone += 1
    for on, changes in by_mesh.items():
        together, others = batches(on, changes)
        alone += len(others)
        for numbers in together:
            flow += _flow_on(on, [changes[number] for number in numbers], budget)
    return FlowExplanation(
        len(dtensors),
        sum([tensor.numel() * tensor.element_size() for tensor in dtensors.values()]),
        _sorted({rank for tensor in dtensors.values() for rank in _ranks(tensor.device_mesh)}),
        _sorted({rank for onto, _ in targets.values() for rank in _ranks(onto)}),
        flow,
        budget,
        alone,
        sum([is_pending(tensor) for tensor in across.values()]),
    )


def _flow_across(tensors: Sequence[DTensor], targets: Sequence[Target], budget: int) -> Flow:
    """Compute what all ranks send to one another when each tensor moves to its target, on another mesh."""
    if not tensors:
        return NOTHING
    # Pending tensors are reduced before they move, so count them with the placements that they have then.
    reduced = [dtensor_like(t, t._local_tensor, t.device_mesh, reduced_placements(t)) for t in tensors]
    return Flow.of(moves_across(reduced, targets, Meshes()), budget)


def _flow_on(mesh: DeviceMesh, changes: Sequence[Change], budget: int) -> Flow:
    """What ranks send for these changes together, in all slices of the mesh along the axes that move."""
    axes = sorted(frozenset().union(*[change.axes for change in changes]))
    others = [range(1) if axis in axes else range(size) for axis, size in enumerate(mesh.shape)]
    flow = NOTHING
    for coordinate in itertools.product(*others):
        flow = flow.beside(Flow.of(moves_along(changes, ranks_along(mesh, axes, coordinate)), budget))
    return flow


def _ranks(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()  # type: ignore[no-any-return]


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))
