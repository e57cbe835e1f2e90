"""Run a plan on one rank: its steps become functions of the local tensor, made once and kept with the plan.

Collectives are functional ones, so that compiling, fake tensors and CommDebugMode see what runs. Even splits
pack and unpack with one copy at most; the others piece by piece. A collective is up to three functions, which pack,
communicate and unpack: whoever calls one after the other holds only what the next one reads, so that what was packed
is free before anything is unpacked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.nn.functional import pad

from ._own_part import all_to_all_by_size
from ._pack import (
    MOVED,
    Coordinate,
    Local,
    Place,
    Stages,
    as_bytes,
    assembled,
    flattened,
    joined,
    nothing_of,
    packing,
    part,
    unpacking_in_place,
)
from ._planner.grids import grids
from ._planner.regions import in_runs
from ._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Divide,
    Embed,
    Narrow,
    ReduceScatter,
    Step,
    last_collective,
)
from ._rounds import all_to_all_in_rounds, reduce_scatter_in_rounds
from ._spelling import gathered, scattered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._joint_groups import Group
    from ._planner.regions import Box

_functional = torch.ops._c10d_functional


def runners(
    steps: Sequence[Step],
    coordinate: Coordinate,
    held: Box,
    group_of: Callable[[tuple[int, ...]], Group],
    async_op: bool = False,
) -> Stages:
    """What takes the local tensor of the source, the box `held`, to that of the target, one function after the other.

    With `async_op` the last collective isn't waited for here: its result is an `AsyncCollectiveTensor`, for which
    whatever reads it waits. Where something reads it here, an unpack that copies or a step after it, it is waited for
    at once, and so is what runs in rounds.
    """
    last = last_collective(steps)
    made: list[Local] = []
    for number, step in enumerate(steps):
        wanted = held if isinstance(step, Divide) else step.after.box(coordinate)
        place = Place(coordinate, held, wanted)
        if isinstance(step, Collective):
            finish = _later if async_op and number == last else _wait
            made += _COLLECTIVES[type(step)](step, place, group_of(step.axes), finish)
        else:
            made.append(_LOCAL[type(step)](step, place))
        held = wanted
    return tuple(made)


def _divide(step: Divide, place: Place) -> Local:
    return lambda local: local / step.by


def _narrow(step: Narrow, place: Place) -> Local:
    box = step.box(place.coordinate)
    if 0 in box.length:
        return lambda local: nothing_of(local, box.length)
    return lambda local: part(local, box)


def _embed(step: Embed, place: Place) -> Local:
    box, shape = step.box(place.coordinate), place.wanted.length
    around = [(start, whole - start - length) for start, length, whole in zip(*box, shape, strict=True)]
    padding = [zeros for ends in reversed(around) for zeros in ends]  # the last dim first
    return lambda local: pad(local, padding)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return _functional.wait_tensor(tensor)


def _later(tensor: torch.Tensor) -> torch.Tensor:
    """Waited for when it is first used, except while tracing."""
    return _wait(tensor) if _are_we_tracing() else AsyncCollectiveTensor(tensor)


def _all_reduce(step: AllReduce, place: Place, group: Group, finish: Local) -> Stages:
    op, name = step.op, group.name
    return (lambda local: finish(_functional.all_reduce(local, op, name)),)  # all_reduce itself makes a contiguous copy


def _moved(run: Local) -> Local:
    """Run a collective on contiguous tensors of any type: as bytes where backends don't move the type."""

    def on_bytes(flat: torch.Tensor) -> torch.Tensor:
        if flat.dtype in MOVED:
            return run(flat)
        return run(as_bytes(flat)).view(flat.dtype)

    return on_bytes


def _all_gather(step: AllGather, place: Place, group: Group, finish: Local) -> Stages:
    shape = place.wanted.length
    size, chunk, held = step.ranks, step.chunk, place.held.elements
    spelled = gathered(step, place.held, place.wanted) if group.in_order else None
    if spelled is not None:
        return _all_gather_spelled(*spelled, size, group, finish)
    gather = _moved(lambda flat: finish(_functional.all_gather_into_tensor(flat, size, group.name)))
    grid = grids(step, place.held, place.wanted)[1] if group.in_order else None
    if grid is not None:
        land = unpacking_in_place(grid, shape)
    else:
        pieces = [(group.places[piece.member] * chunk, piece.box) for piece in step.pieces(place.coordinate)]
        blocks = in_runs(pieces)
        land = lambda flat: assembled(flat, blocks, shape)  # noqa: E731
    return (flattened if held == chunk else _padded(chunk - held)), gather, land


def _all_gather_spelled(pack: Local, join: Local | None, size: int, group: Group, finish: Local) -> Stages:
    gather = _moved(lambda local: finish(_functional.all_gather_into_tensor(local, size, group.name)))
    return (pack, gather) if join is None else (pack, gather, join)


def _padded(more: int) -> Local:
    return lambda local: pad(flattened(local), (0, more))


def _all_to_all(step: AllToAll, place: Place, group: Group, finish: Local) -> Stages:
    if step.rounds > 1:
        return (all_to_all_in_rounds(step, place, group),)
    return all_to_all_by_size(step, place, group, finish)


def _reduce_scatter(step: ReduceScatter, place: Place, group: Group, finish: Local) -> Stages:
    if step.rounds > 1:
        return (reduce_scatter_in_rounds(step, place, group),)
    shape = place.wanted.length
    op, size, name, mine = step.op, step.ranks, group.name, place.wanted.elements
    spelled = scattered(step, place.held, place.wanted) if group.in_order else None
    if spelled is not None:
        return spelled, lambda local: finish(_functional.reduce_scatter_tensor(local, op, size, name))
    grid = grids(step, place.held, place.wanted)[0] if group.in_order else None
    pack = packing(grid) if grid is not None else _pack_padded(step, place.coordinate, group)

    def land(flat: torch.Tensor) -> torch.Tensor:
        return (flat if flat.numel() == mine else flat.narrow(0, 0, mine)).view(shape)

    return pack, lambda flat: finish(_functional.reduce_scatter_tensor(flat, op, size, name)), land


def _pack_padded(step: ReduceScatter, coordinate: Coordinate, group: Group) -> Local:
    """Each member's piece, padded to the length of the longest, in the order of the group."""
    chunk = step.chunk
    pieces = [(group.places[piece.member] * chunk, piece.box) for piece in step.pieces(coordinate)]
    blocks, end = [(at, box) for at, box in in_runs(sorted(pieces)) if at is not None], step.ranks * chunk

    def run(local: torch.Tensor) -> torch.Tensor:
        packed: list[torch.Tensor] = []
        at = 0
        for begin, box in blocks:
            if begin != at:
                packed.append(local.new_zeros(begin - at))
            packed.append(part(local, box))
            at = begin + box.elements
        return joined([*packed, local.new_zeros(end - at)] if at < end else packed)

    return run


_LOCAL: dict[type, Callable[..., Local]] = {Narrow: _narrow, Embed: _embed, Divide: _divide}
_COLLECTIVES: dict[type, Callable[..., Stages]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
}
