"""Run a plan on one rank: each step becomes a function of the local tensor, made once and kept with the plan.

Collectives are torch's functional ones, so that compiling, fake tensors and CommDebugMode see what runs. Even splits
pack and unpack with one copy at most; the others piece by piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing

from ._planner.grids import Grid, grids
from ._planner.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Divide,
    Embed,
    Narrow,
    Piece,
    ReduceScatter,
    Step,
)
from ._spelling import MOVED, gathered, scattered

if TYPE_CHECKING:
    from ._joint_groups import Group
    from ._planner.boxes import Box

Local = Callable[[torch.Tensor], torch.Tensor]
Coordinate = Sequence[int]

_functional = torch.ops._c10d_functional

_LARGE = 1 << 20  # bytes of a message from which on a second copy of it costs more than some more calls

_REDUCE = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_REDUCED = MOVED | {torch.int16, torch.complex64, torch.complex128}


def reduces(op: str | None, dtype: torch.dtype) -> bool:
    """Whether a rank can bring terms together by itself: of eight bits, say, torch adds no floats."""
    return dtype in _REDUCED and not (dtype.is_complex and op in ("max", "min"))


class Place(NamedTuple):
    """Where a step runs: this rank's coordinate, and what it holds before the step and after it."""

    coordinate: Coordinate
    held: Box
    wanted: Box


def runners(
    steps: Sequence[Step],
    coordinate: Coordinate,
    held: Box,
    group_of: Callable[[tuple[int, ...]], Group],
    async_op: bool = False,
) -> tuple[Local, ...]:
    """One function a step; together they take the local tensor of the source, the box `held`, to that of the target.

    With `async_op` the last collective isn't waited for where nothing but a view follows it.
    """
    last = max([number for number, step in enumerate(steps) if isinstance(step, Collective)], default=-1)
    made: list[Local] = []
    for number, step in enumerate(steps):
        if isinstance(step, Divide):
            made.append(_divide(step))
            continue
        place = Place(coordinate, held, step.after.box(coordinate))
        if isinstance(step, Collective):
            finish = _later if async_op and number == last else _wait
            made.append(_COLLECTIVES[type(step)](step, place, group_of(step.axes), finish))
        else:
            made.append(_LOCAL[type(step)](step, place))
        held = place.wanted
    return tuple(made)


def _divide(step: Divide) -> Local:
    return lambda local: local / step.by


def _narrow(step: Narrow, place: Place) -> Local:
    box = step.box(place.coordinate)
    if 0 in box.length:
        return lambda local: local.new_empty(box.length)
    return lambda local: _part(local, box)


def _embed(step: Embed, place: Place) -> Local:
    box, shape = step.box(place.coordinate), place.wanted.length

    def run(local: torch.Tensor) -> torch.Tensor:
        whole = local.new_zeros(shape)
        _part(whole, box).copy_(local)
        return whole

    return run


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return _functional.wait_tensor(tensor)


def _later(tensor: torch.Tensor) -> torch.Tensor:
    """Waited for when it is first used, except while tracing, where torch waits too."""
    return _wait(tensor) if _are_we_tracing() else AsyncCollectiveTensor(tensor)


def _all_reduce(step: AllReduce, place: Place, group: Group, finish: Local) -> Local:
    op, name = step.op, group.name
    return lambda local: finish(_functional.all_reduce(local.contiguous(), op, name))


def _moved(run: Local) -> Local:
    """A collective on a flat tensor of a type that backends move, for any type."""

    def on_bytes(flat: torch.Tensor) -> torch.Tensor:
        if flat.dtype in MOVED:
            return run(flat)
        return run(_bytes(flat)).view(flat.dtype)

    return on_bytes


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def _flat(local: torch.Tensor) -> torch.Tensor:
    """All elements, one after the other in memory; of a single column, `reshape` would make a view that skips some."""
    return local.reshape(-1).contiguous()


def _pack(grid: Grid) -> Local:
    """From the local tensor to what goes to the members, flat."""
    lengths, times, order = grid
    if grid.plain:
        return _flat
    if times != lengths:
        return lambda local: _flat(local.reshape(lengths).expand(times).permute(order))
    return lambda local: _flat(local.reshape(lengths).permute(order))


def _unpack(grid: Grid, shape: Sequence[int]) -> Local:
    """From what came from the members, flat, to the local tensor."""
    lengths, _, order = grid
    if grid.plain:
        return lambda flat: flat.view(shape)
    return lambda flat: flat.view(lengths).permute(order).reshape(shape).contiguous()


def _all_gather(step: AllGather, place: Place, group: Group, finish: Local) -> Local:
    shape = place.wanted.length
    size, chunk, held = step.ranks, step.chunk, place.held.elements
    spelled = gathered(step, place.held, place.wanted) if group.in_order else None
    if spelled is not None:
        return _all_gather_spelled(*spelled, size, group, finish)
    gather = _moved(lambda flat: finish(_functional.all_gather_into_tensor(flat, size, group.name)))
    grid = grids(step, place.held, place.wanted)[1] if group.in_order else None
    if grid is not None:
        land = _unpack(grid, shape)
    else:
        pieces = [(group.places[piece.member] * chunk, piece.box) for piece in step.pieces(place.coordinate)]
        land = lambda flat: _assemble(flat, pieces, shape)  # noqa: E731

    def run(local: torch.Tensor) -> torch.Tensor:
        flat = _flat(local)
        if held < chunk:
            flat = torch.cat([flat, flat.new_zeros(chunk - held)])
        return land(gather(flat))

    return run


def _all_gather_spelled(pack: Local, join: Local | None, size: int, group: Group, finish: Local) -> Local:
    name = group.name
    if join is None:
        gather = _moved(lambda local: finish(_functional.all_gather_into_tensor(local, size, name)))
        return lambda local: gather(pack(local))
    gather = _moved(lambda local: _wait(_functional.all_gather_into_tensor(local, size, name)))
    return lambda local: join(gather(pack(local)))


def _assemble(flat: torch.Tensor, pieces: Sequence[tuple[int, Box]], shape: Sequence[int]) -> torch.Tensor:
    """A tensor of this shape from blocks that lie at these offsets of a flat one."""
    views = [flat.narrow(0, at, box.elements).view(box.length) for at, box in pieces]
    dim = _row(pieces, shape)
    if dim is None:
        whole = flat.new_empty(shape)
        for view, (_, box) in zip(views, pieces, strict=True):
            _part(whole, box).copy_(view)
        return whole
    if len(views) > 1:
        return torch.cat(views, dim)
    return views[0] if views[0].numel() == flat.numel() else views[0].clone()


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Blocks, each row-major and one after the other."""
    if len(parts) == 1:
        return _flat(parts[0])
    lengths = [part.numel() for part in parts]
    large = sum(lengths) * parts[0].element_size() >= _LARGE
    if not large or _are_we_tracing() or all(part.is_contiguous() for part in parts):
        return torch.cat([part.reshape(-1) for part in parts])
    flat = parts[0].new_empty(sum(lengths))  # to flatten them first would copy them twice
    torch._foreach_copy_([piece.view(part.shape) for piece, part in zip(flat.split(lengths), parts)], parts)
    return flat


def _row(pieces: Sequence[tuple[int, Box]], shape: Sequence[int]) -> int | None:
    """The dim along which the boxes follow one another and fill the shape, if there is one."""
    for dim in range(len(shape)):
        at = 0
        for _, box in pieces:
            across = all(n == m for d, (n, m) in enumerate(zip(box.length, shape, strict=True)) if d != dim)
            if not across or box.start[dim] != at:
                break
            at += box.length[dim]
        else:
            if pieces and at == shape[dim]:
                return dim
    return None


def _reduce_scatter(step: ReduceScatter, place: Place, group: Group, finish: Local) -> Local:
    shape = place.wanted.length
    size, mine = step.ranks, place.wanted.elements
    spelled = scattered(step, place.held, place.wanted) if group.in_order else None
    if spelled is not None:
        return lambda local: finish(_functional.reduce_scatter_tensor(spelled(local), step.op, size, group.name))
    grid = grids(step, place.held, place.wanted)[0] if group.in_order else None
    gather_up = _pack(grid) if grid is not None else _pack_padded(step, place.coordinate, group)

    def run(local: torch.Tensor) -> torch.Tensor:
        scattered = finish(_functional.reduce_scatter_tensor(gather_up(local), step.op, size, group.name))
        return (scattered if scattered.numel() == mine else scattered.narrow(0, 0, mine)).view(shape)

    return run


def _pack_padded(step: ReduceScatter, coordinate: Coordinate, group: Group) -> Local:
    """Each member's piece, padded to the length of the longest, in the order of the group."""
    boxes: list[Box | None] = [None] * step.ranks
    for piece in step.pieces(coordinate):
        boxes[group.places[piece.member]] = piece.box

    def run(local: torch.Tensor) -> torch.Tensor:
        packed: list[torch.Tensor] = []
        for box in boxes:
            if box is not None:
                packed.append(_part(local, box))
            padding = step.chunk - (box.elements if box is not None else 0)
            if padding:
                packed.append(local.new_zeros(padding))
        return _joined(packed)

    return run


def _splits(pieces: Sequence[Piece], group: Group) -> list[int]:
    """How many elements go to, or come from, each rank of the group."""
    counts = [0] * len(group.places)
    for piece in pieces:
        counts[group.places[piece.member]] += piece.box.elements
    return counts


def _all_to_all(step: AllToAll, place: Place, group: Group, finish: Local) -> Local:
    coordinate, held, wanted = place
    pack, unpack = grids(step, held, wanted) if group.in_order else (None, None)
    whole = wanted.length
    if pack is not None:
        send_splits = [math.prod(pack.times) // step.ranks] * step.ranks
        gather_up = _pack(pack)
    else:
        sends = step.sends(coordinate)
        send_splits = _splits(sends, group)
        gather_up = _pack_pieces(sends, group)
    if unpack is not None:
        receive_splits = [wanted.elements // step.ranks] * step.ranks
        land = _unpack(unpack, whole)
    else:
        receives = step.receives(coordinate)
        receive_splits = _splits(receives, group)
        if any(receive_splits) and not any(send_splits):
            # The fake backend of 2.13 refuses to send nothing: one element goes to oneself, where nobody reads it.
            own = group.places[step.members(coordinate).index(tuple(coordinate))]
            send_splits[own] = receive_splits[own] = 1
            gather_up = lambda local: local.new_empty(1)  # noqa: E731
        land = _land_pieces(step, receives, receive_splits, group, whole)

    def run(local: torch.Tensor) -> torch.Tensor:
        flat = gather_up(local)
        if flat.dtype in MOVED:
            return land(finish(_functional.all_to_all_single(flat, receive_splits, send_splits, group.name)))
        width = flat.element_size()
        sent, received = [n * width for n in send_splits], [n * width for n in receive_splits]
        arrived = finish(_functional.all_to_all_single(_bytes(flat), received, sent, group.name))
        return land(arrived.view(local.dtype))

    return run


def _pack_pieces(sends: Sequence[Piece], group: Group) -> Local:
    boxes = [piece.box for piece in sorted(sends, key=lambda piece: group.places[piece.member])]

    def run(local: torch.Tensor) -> torch.Tensor:
        return _joined([_part(local, box) for box in boxes]) if boxes else local.new_empty(0)

    return run


def _land_pieces(
    step: AllToAll, receives: Sequence[Piece], splits: Sequence[int], group: Group, shape: Sequence[int]
) -> Local:
    starts = [0, *itertools.accumulate(splits)]
    landing = [(starts[group.places[piece.member]], piece) for piece in receives]
    if step.op is None:
        pieces = [(start, piece.box) for start, piece in landing]
        return lambda flat: _assemble(flat, pieces, shape)
    return lambda flat: _reduced(flat, landing, shape, step)


def _reduced(
    flat: torch.Tensor, landing: Sequence[tuple[int, Piece]], shape: Sequence[int], step: AllToAll
) -> torch.Tensor:
    """Every term into its box; all ranks add in the same order."""
    whole = flat.new_empty(shape)
    combine = _REDUCE[step.op or "sum"]
    for offset, piece in landing:
        target = _part(whole, piece.box)
        term = flat.narrow(0, offset, piece.box.elements).view(piece.box.length)
        target.copy_(combine(target, term) if piece.add else term)
    if step.op == "avg":
        whole = whole / math.prod(step.before.sizes[axis] for axis in step.reduced)
    return whole


_LOCAL: dict[type, Callable[..., Local]] = {Narrow: _narrow, Embed: _embed}
_COLLECTIVES: dict[type, Callable[..., Local]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
}
