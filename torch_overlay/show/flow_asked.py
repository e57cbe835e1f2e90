"""From what a user asks of many tensors to an explanation: a tree with other placements, another mesh, a `Transfer`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from ..transfer import Transfer
from ..transfers._planner.flow import NOTHING, Flow
from ..transfers._planner.reductions import phases
from ..transfers.descriptions import Meshes
from ..transfers.one_mesh import batches, moves_along, ranks_along, read_change
from ..transfers.targets import target_placements
from ..transfers.trees import leaves
from ..transfers.two_meshes import moves_across, reductions_across
from .asked import of_tensor
from .flow import FlowExplanation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from ..transfers.one_mesh import Change
    from ..transfers.targets import Placements

Target = tuple["DeviceMesh", "Placements"]


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
        None if across else _collectives_on_stock(moving, wanted),
        alone,
    )


def _flow_across(tensors: Sequence[DTensor], targets: Sequence[Target], budget: int) -> Flow:
    if not tensors:
        return NOTHING
    meshes = Meshes()
    moves = moves_across(tensors, targets, meshes)
    parts = phases(reductions_across(tensors, meshes), [move.itemsize for move in moves], budget)
    types = [(tensor.device_mesh, tensor.dtype) for tensor in tensors]
    return Flow.of(parts, moves, types, budget)


def _flow_on(mesh: DeviceMesh, changes: Sequence[Change], budget: int) -> Flow:
    """Ranks that differ along other axes do the same beside one another."""
    axes = sorted(frozenset().union(*[change.axes for change in changes]))
    others = [range(1) if axis in axes else range(size) for axis, size in enumerate(mesh.shape)]
    found = NOTHING
    for here in itertools.product(*others):
        moves = moves_along(changes, ranks_along(mesh, axes, here))
        parts = phases([change.reduction for change in changes], [move.itemsize for move in moves], budget)
        found = found.beside(Flow.of(parts, moves, [change.tensor.dtype for change in changes], budget))
    return found


def _collectives_on_stock(tensors: Mapping[str, DTensor], wanted: Mapping[str, Target]) -> int:
    """What a loop of `redistribute` takes, one tensor after the other; equal ones are planned once."""
    kinds = Counter([(tensor._spec, wanted[name][1]) for name, tensor in tensors.items()])
    first = {(tensor._spec, wanted[name][1]): tensor for name, tensor in tensors.items()}
    return sum([times * of_tensor(first[kind], kind[1]).torch.collectives for kind, times in kinds.items()])


def _members(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()  # type: ignore[no-any-return]


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))
