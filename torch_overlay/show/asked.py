"""From what a user asks to an explanation: from words on a command line, or from a DTensor in a program."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Shard

from .. import options
from ..choices import Choices
from ..compat.tensor_mesh import as_views
from ..distributed._mesh.caches import real_mesh
from ..distributed._torch_layout import from_torch
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._plans.specs import read_cuts
from . import typed
from .explanation import Explanation
from .placements import Placement as Placed
from .question import Question, cost_of
from .sides import explained
from .torch_steps import make_spec, stand_in_mesh, to_torch_placement, word_of

if TYPE_CHECKING:
    from .flow import FlowExplanation


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of this name. Raises ValueError if it has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"--dtype: this torch has no dtype {name!r}")
    return found


def of_words(
    question: Question,
    ends: Sequence[Sequence[Placed]],
    dtype: torch.dtype,
    device_type: str,
    flattened: Sequence[tuple[int, ...]],
) -> Explanation:
    """Explain for a mesh that stands for one of these sizes, seen from its first rank; no process group is made."""
    mesh = stand_in_mesh(device_type, question.sizes, question.ranks, question.names, flattened)
    specs = [make_spec(mesh, [to_torch_placement(p) for p in end], question.shape, dtype) for end in ends]
    return explained(question, *specs)


def of_anything(
    tensors: Any, placements: Any, device_mesh: DeviceMesh | None, budget: int
) -> Explanation | FlowExplanation:
    """See `torch_overlay.explain`."""
    from ..transfer import Transfer

    if isinstance(tensors, Transfer):
        from .flow_asked import of_transfer

        return of_transfer(tensors)
    if device_mesh is not None or isinstance(tensors, (dict, list, tuple)):
        from .flow_asked import of_tree

        return of_tree(tensors, placements, device_mesh, budget)
    return of_tensor(tensors, placements)


def of_tensor(tensor: Any, placements: Sequence[Any] | str) -> Explanation:
    """Explain `tensor.redistribute(placements=placements)`, with the groups and options of this process."""
    source = getattr(tensor, "_spec", None)
    if not isinstance(source, DTensorSpec) or source.tensor_meta is None:
        raise TypeError(f"explain() needs a DTensor and placements, got {type(tensor).__name__}")
    mesh = real_mesh(source.mesh)
    target = DTensorSpec(mesh, _placements(placements, mesh, source.ndim), tensor_meta=source.tensor_meta)
    with as_views() as on:
        return explained(_question(mesh, source, target, on), source, target)


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


def _question(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec, on: bool) -> Question:
    settings = options()
    shape, sizes = tuple(source.shape), tuple(mesh.shape)
    names = tuple(mesh.mesh_dim_names or typed.names(None, mesh.ndim))
    before, after, refused = _read(mesh, source, target)
    return Question(
        words=("·".join(map(word_of, source.placements)), "·".join(map(word_of, target.placements))),
        shape=shape,
        sizes=sizes,
        source=before,
        target=after,
        refused=refused,
        names=names,
        ranks=tuple(mesh.mesh.flatten().tolist()),
        dtype=str(source.tensor_meta.dtype).removeprefix("torch."),
        itemsize=source.tensor_meta.dtype.itemsize,
        groups=_groups(mesh, settings, on),
        # Torch's names only: the options' topology may name axes of other meshes.
        cost=cost_of(names, tuple(row for row in settings.topology or () if row[0] in names)),
        named=bool(mesh.mesh_dim_names),
    )


def _read(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> tuple[Regions | None, Regions | None, str]:
    """What the specs mean to the planner, and why it would not plan, if so."""
    from ..distributed.tensor._plans.question import why_not

    shape, sizes = tuple(source.shape), tuple(mesh.shape)
    try:
        before, after = (
            read_cuts(tuple(spec.placements), spec.shard_order, len(shape), sizes).on(shape, sizes)
            for spec in (source, target)
        )
    except NotPlanned as reason:
        return None, None, str(reason)
    return before, after, why_not(mesh, source, target) or ""


def _groups(mesh: DeviceMesh, settings: Choices, on: bool) -> frozenset[tuple[int, ...]] | None:
    """For which sets of axes the overlay has a group: what it would use now, or, while it is off, what a mesh that is
    made under it would have."""
    from ..distributed.tensor._plans.groups import joint_axes

    policy = "existing" if settings.share_groups == "off" else settings.flatten
    if policy == "create":
        return None
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
