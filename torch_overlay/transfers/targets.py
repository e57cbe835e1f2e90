"""Targets: which placements each tensor of a tree shall have, from the ways in which a user may say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from .trees import leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

Placements = tuple[Placement, ...]


def target_placements(
    tensors: dict[str, DTensor], placements: Any, mesh: DeviceMesh | None
) -> dict[str, tuple[DeviceMesh, Placements]]:
    """For each tensor its mesh and its placements there.

    Args:
        placements: one for all axes, one for each axis, a function of a name and a tensor that gives one of these, or a
            tree of them like the tensors'.

    Raises:
        ValueError: a tensor has none, or another number of them than its mesh has axes.
        TypeError: something that is none of these.
    """
    rule = _rule(placements)
    found = {}
    for name, tensor in tensors.items():
        given, onto = rule(name, tensor), mesh if mesh is not None else tensor.device_mesh
        chosen = (given,) * onto.ndim if isinstance(given, Placement) else given
        if not _is_sequence(chosen):
            raise TypeError(f"placements for {name!r}: needed a placement or one for each axis, got {given!r}")
        if len(chosen) != onto.ndim:
            raise ValueError(f"placements for {name!r}: a mesh of {onto.ndim} axes needs as many, got {len(chosen)}")
        found[name] = onto, tuple([_counted_from_start(name, tensor, placement) for placement in chosen])
    return found


def _rule(placements: Any) -> Callable[[str, DTensor], Any]:
    if isinstance(placements, Placement) or _is_sequence(placements):
        return lambda name, tensor: placements
    if callable(placements):
        return placements  # type: ignore[no-any-return]
    tree = leaves(placements, lambda leaf: _is_sequence(leaf))

    def from_tree(name: str, tensor: DTensor) -> Any:
        if name not in tree:
            raise ValueError(f"placements: the tree has none for {name!r}")
        return tree[name]

    return from_tree


def _is_sequence(given: Any) -> bool:
    """Placements, one for each axis; of a mesh without axes, none."""
    return isinstance(given, Sequence) and all(isinstance(placement, Placement) for placement in given)


def _counted_from_start(name: str, tensor: DTensor, placement: Placement) -> Placement:
    if type(placement) is not Shard:
        return placement
    if not -tensor.ndim <= placement.dim < tensor.ndim:
        raise ValueError(f"placements for {name!r}: {placement} of a tensor with {tensor.ndim} dims")
    return placement if placement.dim >= 0 else Shard(placement.dim + tensor.ndim)
