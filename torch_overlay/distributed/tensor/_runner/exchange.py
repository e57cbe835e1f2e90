"""Run an all-to-all: pack what each member gets, exchange, and unpack, with a reduction
of the terms if there is one.

Rows of a 4 x 4 tensor become columns on four ranks: each packs its row, four pieces of
one element, sends one to each member of the group, itself included, and makes a column
of the four that arrive.

If all pieces have one shape, packing and unpacking is a view, a permute and a copy
(`Grid`); else it goes piece by piece. Of a large message the rank's own part stays
where it is until the others' parts have come: it is copied once, and takes no memory in
what is sent and in what arrives. A very large one goes in rounds: one part of each
piece is packed, sent and put in its place before the next one. Start at
`all_to_all_by_size`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._functional_collectives import _are_we_tracing

from ..._torch import never_nothing
from .._planner.cost import cut_into_rounds
from .._planner.grids import grids, talkers
from .._planner.regions import OPS, Box, in_runs

if TYPE_CHECKING:
    from .._planner.grids import Grid
    from .._planner.steps import AllToAll, Coordinate, Piece, ReduceScatter
    from .at_hand import Group


# --- Packing and unpacking one flat tensor ---

Local = Callable[[torch.Tensor], torch.Tensor]
# the first takes a local tensor, each other what the one before it returned
Stages = tuple[Callable[[Any], Any], ...]
# where each box begins in a flat tensor; None if it lies elsewhere
Blocks = Sequence[tuple[int | None, Box]]

# What NCCL and Gloo move; other types travel as their bytes.
MOVED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}

# Bytes of a message from which on a second copy of it costs more than some more calls,
# by type of device; of others, as on the CPU. Measured there; for GPUs taken over,
# until it is measured on one.
LARGE: Mapping[str, int] = MappingProxyType({"cpu": 1 << 20, "cuda": 1 << 20})


def is_large(tensor: torch.Tensor, elements: int) -> bool:
    """Whether so many elements of its type are worth more calls than one copy takes,
    where tensors may be changed; not those of a subclass, a Parameter for example."""
    if type(tensor) is not torch.Tensor:
        return False
    kind = "cpu" if tensor.is_cpu else tensor.device.type
    least = LARGE[kind] if kind in LARGE else LARGE["cpu"]
    return elements * tensor.element_size() >= least and may_change(tensor)


def may_change(tensor: torch.Tensor) -> bool:
    """Whether a tensor that nobody else has may be changed in place: not while tracing,
    nor under autograd."""
    return not _are_we_tracing() and not (
        tensor.requires_grad and torch.is_grad_enabled()
    )


class Here(NamedTuple):
    """Where a step runs: this rank's coordinate, and what it holds before the step and
    after it."""

    coordinate: Coordinate
    held: Box
    wanted: Box


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def nothing_of(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor without elements that comes from this one. AOTAutograd drops a
    collective that nothing depends on (as dead code), and its partitioner runs one that
    depends on nothing in both graphs, forward and backward; other ranks run it once."""
    return tensor.reshape(-1).narrow(0, 0, 0).view(shape)


def flattened(local: torch.Tensor) -> torch.Tensor:
    """All elements, one after the other in memory; of a single column, `reshape` would
    make a view that skips some."""
    return local.reshape(-1).contiguous()


def packing(grid: Grid) -> Local:
    """From the local tensor to what goes to the members, flat."""
    lengths, expanded, order = grid
    if grid.plain:
        return flattened
    if expanded != lengths:
        return lambda local: flattened(
            local.reshape(lengths).expand(expanded).permute(order)
        )
    return lambda local: flattened(local.reshape(lengths).permute(order))


def unpacking(grid: Grid, shape: Sequence[int]) -> Local:
    """From what came from the members, flat, to the local tensor."""
    lengths, _, order = grid
    if grid.plain:
        return lambda flat: flat.view(shape)
    return lambda flat: flat.view(lengths).permute(order).reshape(shape).contiguous()


def unpacking_in_place(grid: Grid, shape: Sequence[int]) -> Local:
    """`unpacking` where what the first axes bring is in its place already: if the
    blocks within are large, each is sorted by itself in what came, which is
    overwritten, so that a large tensor isn't there twice."""
    lengths, _, order = grid
    fixed = next((i for i, dim in enumerate(order) if i != dim), len(order))
    parts = math.prod(lengths[:fixed])
    once = unpacking(grid, shape)
    if grid.plain or parts == 1:
        return once
    inner = [dim - fixed for dim in order[fixed:]]

    def run(flat: torch.Tensor) -> torch.Tensor:
        if not is_large(flat, flat.numel() // parts):
            return once(flat)
        for block in flat.view(parts, *lengths[fixed:]):
            # The clone is never a view of the block, as one from `reshape` may be, and
            # is gone before the next.
            block.copy_(
                block.permute(inner)
                .clone(memory_format=torch.contiguous_format)
                .view(block.shape)
            )
        return flat.view(shape)

    return run


def assembled(
    flat: torch.Tensor,
    pieces: Blocks,
    shape: Sequence[int],
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """A tensor of this shape from blocks that lie at these offsets of a flat one; the
    one without is `kept`. It is a view of the flat one where the blocks lie in place
    there and at most as much lies behind them."""
    if not pieces:
        return nothing_of(flat, shape)
    dim = _row(pieces, shape)
    if (
        dim is not None
        and flat.numel() <= 2 * math.prod(shape)
        and _in_place(pieces, dim, shape)
    ):
        # keeps the padding in memory, too
        return flat.narrow(0, 0, math.prod(shape)).view(shape)
    views = [view_of(flat, at, box, kept) for at, box in pieces]
    if dim is None:
        whole = flat.new_empty(shape)
        for view, (_, box) in zip(views, pieces, strict=True):
            part(whole, box).copy_(view)
        return whole
    return torch.cat(views, dim).contiguous() if len(views) > 1 else views[0].clone()


def view_of(
    flat: torch.Tensor, at: int | None, box: Box, kept: torch.Tensor | None
) -> torch.Tensor:
    """The block for a box, from this offset on; with no offset, the one that was
    kept."""
    if at is None:
        assert kept is not None, "a block without an offset stayed here"  # noqa: S101
        return kept
    return flat.narrow(0, at, box.elements).view(box.length)


def _in_place(pieces: Blocks, dim: int, shape: Sequence[int]) -> bool:
    """Whether boxes that follow one another along a dim lie as in the tensor that they
    make, from the start on."""
    if math.prod(shape[:dim]) != 1:
        return False
    return [at for at, _ in pieces] == [
        0,
        *itertools.accumulate(box.elements for _, box in pieces),
    ][:-1]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Blocks, each row-major and one after the other, in a flat tensor; of a single
    contiguous one, a view."""
    if parts[0].ndim and all(part.shape[1:] == parts[0].shape[1:] for part in parts):
        return flattened(torch.cat(parts) if len(parts) > 1 else parts[0])
    lengths = [part.numel() for part in parts]
    if not is_large(parts[0], sum(lengths)) or all(
        part.is_contiguous() for part in parts
    ):
        return torch.cat([part.reshape(-1) for part in parts])
    # to flatten them first would copy them twice
    flat = parts[0].new_empty(sum(lengths))
    torch._foreach_copy_(
        [piece.view(part.shape) for piece, part in zip(flat.split(lengths), parts)],
        parts,
    )
    return flat


def _row(pieces: Blocks, shape: Sequence[int]) -> int | None:
    """The dim along which the boxes follow one another and fill the shape, if there is
    one."""
    for dim in range(len(shape)):
        at = 0
        for _, box in pieces:
            across = all(
                n == m
                for d, (n, m) in enumerate(zip(box.length, shape, strict=True))
                if d != dim
            )
            if not across or box.start[dim] != at:
                break
            at += box.length[dim]
        else:
            if at == shape[dim]:
                return dim
    return None


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    plain = flat.resolve_conj().resolve_neg().contiguous()
    # of a dim of length 1, which is contiguous with any stride
    if plain.ndim and plain.stride(-1) != 1:
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8)


# --- Exchanges ---

_functional = torch.ops._c10d_functional


def _reduce_function(op: str) -> Callable[..., torch.Tensor]:
    """Return the function that reduces two tensors of terms to one."""
    name = OPS[op].function
    if name is None:
        raise AssertionError(f"{op} isn't reduced term by term: it is planned as a sum")
    function: Callable[..., torch.Tensor] = getattr(torch, name)
    return function


# where a piece begins in what arrived, or None; its box; whether it is added
Landing = tuple[int | None, "Box", bool]


def all_to_all(step: AllToAll, here: Here, group: Group, finish: Local) -> Stages:
    """Pack, exchange and unpack: by one permute where all pieces are alike, else piece
    by piece. `finish` gets what the collective returns, and waits for it."""
    coordinate, held, wanted = here
    to_pack, to_unpack = grids(step, held, wanted) if group.in_order else (None, None)
    if to_pack is not None and to_unpack is not None:
        talks = talkers(step, coordinate)
        sent, received = (
            math.prod(grid.expanded) // sum(talks) for grid in (to_pack, to_unpack)
        )
        exchange = swap(
            [sent * n for n in talks], [received * n for n in talks], group, finish
        )
        if step.op is None:
            return packing(to_pack), exchange, unpacking(to_unpack, wanted.length)
        return (
            packing(to_pack),
            exchange,
            reducing(to_unpack, len(step.reduced), step.op, wanted.length),
        )
    sends, receives = step.sends(coordinate), step.receives(coordinate)
    send_splits, receive_splits = splits(sends, group), splits(receives, group)
    pack = never_nothing(
        pack_pieces(sends, group),
        send_splits,
        receive_splits,
        group,
        group.places[step.member(coordinate)],
    )
    land = landing(step, receives, receive_splits, group, wanted.length)
    return pack, swap(send_splits, receive_splits, group, finish), land


def swap(
    send_splits: Sequence[int],
    receive_splits: Sequence[int],
    group: Group,
    finish: Local,
) -> Local:
    def run(flat: torch.Tensor) -> torch.Tensor:
        if flat.dtype in MOVED:
            return finish(
                _functional.all_to_all_single(
                    flat, receive_splits, send_splits, group.name
                )
            )
        width = flat.element_size()
        sent, received = (
            [n * width for n in send_splits],
            [n * width for n in receive_splits],
        )
        return finish(
            _functional.all_to_all_single(as_bytes(flat), received, sent, group.name)
        ).view(flat.dtype)

    return run


def pack_pieces(sends: Sequence[Piece], group: Group) -> Callable[..., torch.Tensor]:
    """What goes to members from a local tensor; if nothing, it comes from all tensors
    given, see `unread`."""
    pieces = sorted(sends, key=lambda piece: group.places[piece.member])
    starts = itertools.accumulate([piece.box.elements for piece in pieces], initial=0)
    boxes = [box for _, box in in_runs(zip(starts, [piece.box for piece in pieces]))]

    def run(local: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return (
            joined([part(local, box) for box in boxes])
            if boxes
            else unread(local, *others)
        )

    return run


def unread(*made_from: torch.Tensor) -> torch.Tensor:
    """No elements. They depend on these tensors: of two exchanges of the same a
    compiler makes one, and the other ranks, which send something, would wait for the
    second."""
    return torch.cat([tensor.reshape(-1).narrow(0, 0, 0) for tensor in made_from])


def landing(
    step: AllToAll,
    receives: Sequence[Piece],
    receive_splits: Sequence[int],
    group: Group,
    shape: Sequence[int],
    own: int | None = None,
) -> Callable[..., torch.Tensor]:
    """From what arrived to the local tensor; with `own`, that member's part is the
    second argument."""
    pieces = offsets(receives, receive_splits, group, own)
    op = step.op
    if op is None:
        blocks = in_runs([(at, box) for at, box, _ in pieces])
        return lambda flat, kept=None: assembled(flat, blocks, shape, kept)
    return lambda flat, kept=None: _reduced(flat, pieces, shape, op, kept)


def reducing(grid: Grid, axes: int, op: str, shape: Sequence[int]) -> Local:
    """From the terms that came, of which the first `axes` dims of the grid are, to the
    local tensor. All ranks reduce them in one order."""
    reduce, (lengths, _, order) = _reduce_function(op), grid
    places = list(itertools.product(*[range(lengths[dim]) for dim in order[:axes]]))

    def run(flat: torch.Tensor) -> torch.Tensor:
        terms = flat.view(lengths).permute(order)
        total = terms[places[0]].clone(memory_format=torch.contiguous_format)
        out = may_change(flat)
        for place in places[1:]:
            total = (
                reduce(total, terms[place], out=total)
                if out
                else reduce(total, terms[place])
            )
        return total.reshape(shape)

    return run


def offsets(
    receives: Sequence[Piece],
    receive_splits: Sequence[int],
    group: Group,
    own: int | None,
) -> list[Landing]:
    """Where each piece lies in what arrived; `own`, a member, didn't send its piece."""
    starts = [0, *itertools.accumulate(receive_splits)]
    return [
        (
            starts[group.places[piece.member]] if piece.member != own else None,
            piece.box,
            piece.add,
        )
        for piece in receives
    ]


def _reduced(
    flat: torch.Tensor,
    pieces: Sequence[Landing],
    shape: Sequence[int],
    op: str,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    if not pieces:
        return nothing_of(flat, shape)
    whole = flat.new_empty(shape)
    combine(whole, flat, pieces, op, kept)
    return whole


def combine(
    whole: torch.Tensor,
    flat: torch.Tensor,
    pieces: Sequence[Landing],
    op: str | None,
    kept: torch.Tensor | None,
) -> None:
    """Every piece into its box of a contiguous tensor, written or, if a term, added;
    all ranks add in one order."""
    if all(at is None for at, _, _ in pieces) and _are_we_tracing():
        # AOTAutograd's partitioner drops what nobody reads, and the other ranks would
        # wait for this one.
        whole.view(-1).narrow(0, 0, 0).copy_(flat.narrow(0, 0, 0))
    # Without an op no piece is added, so the function isn't called.
    reduce = _reduce_function(op or "sum")
    out = may_change(flat) and (kept is None or may_change(kept))
    for at, box, add in pieces:
        target = part(whole, box)
        term = view_of(flat, at, box, kept)
        if add and out:
            reduce(target, term, out=target)
        else:
            target.copy_(reduce(target, term) if add else term)


def splits(pieces: Sequence[Piece], group: Group) -> list[int]:
    """How many elements go to, or come from, each rank of the group."""
    counts = [0] * len(group.places)
    for piece in pieces:
        counts[group.places[piece.member]] += piece.box.elements
    return counts


class Apart(NamedTuple):
    """What goes to the others, or came from them; the rank's own part, a view of the
    local tensor, which must not change until `land` has it; and what to do with
    both."""

    flat: torch.Tensor
    own: torch.Tensor
    exchange: Local
    land: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def all_to_all_by_size(
    step: AllToAll, here: Here, group: Group, finish: Local
) -> Stages:
    """Pack, exchange and unpack: everything, or of a large message all but the rank's
    own part."""
    pack, exchange, land = all_to_all(step, here, group, finish)
    elements = max(here.held.elements, here.wanted.elements)
    # made for the first large one
    others = functools.cache(lambda: _others(step, here, group, finish))

    def start(local: torch.Tensor) -> torch.Tensor | Apart:
        large = others() if is_large(local, elements) else None
        return pack(local) if large is None else large(local)

    def send(sent: torch.Tensor | Apart) -> torch.Tensor | Apart:
        return (
            sent._replace(flat=sent.exchange(sent.flat))
            if isinstance(sent, Apart)
            else exchange(sent)
        )

    def end(came: torch.Tensor | Apart) -> torch.Tensor:
        return came.land(came.flat, came.own) if isinstance(came, Apart) else land(came)

    return start, send, end


def _others(
    step: AllToAll, here: Here, group: Group, finish: Local
) -> Callable[[torch.Tensor], Apart] | None:
    """Packs all but the rank's own part; None where it has none, or has only this to
    send or to get."""
    own = step.member(here.coordinate)
    sends, receives = step.sends(here.coordinate), step.receives(here.coordinate)
    sent, received = (
        [piece for piece in pieces if piece.member != own]
        for pieces in (sends, receives)
    )
    if not sent or not received or len(received) == len(receives):
        return None
    (kept,) = [piece.box for piece in sends if piece.member == own]
    exchanged = splits(sent, group), splits(received, group)
    pack, exchange = pack_pieces(sent, group), swap(*exchanged, group, finish)
    land = landing(step, receives, exchanged[1], group, here.wanted.length, own)
    return lambda local: Apart(pack(local), part(local, kept), exchange, land)


class _Round(NamedTuple):
    """What one round does.

    Attributes:
        exchange: from the local tensor, and the result so far, to what arrived.
        land: into the result, what arrived and what stays of the local tensor.
    """

    exchange: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    land: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def all_to_all_in_rounds(step: AllToAll, here: Here, group: Group) -> Local:
    """The whole of an all-to-all."""
    own = step.member(here.coordinate)
    sends = _in_parts(step.sends(here.coordinate), step.rounds)
    receives = _in_parts(step.receives(here.coordinate), step.rounds)
    rounds = [
        _one_round(step, *pieces, own, group)
        for pieces in zip(sends, receives, strict=True)
    ]

    def run(local: torch.Tensor) -> torch.Tensor:
        whole = local.new_empty(here.wanted.length)
        for exchange, land in rounds:
            land(whole, exchange(local, whole), local)
        return whole

    return run


def _in_parts(pieces: Sequence[Piece], rounds: int) -> list[list[Piece]]:
    """What each round moves of these pieces, in their order; pieces without elements
    are left out."""
    found: list[list[Piece]] = [[] for _ in range(rounds)]
    for piece in pieces:
        for number, box in enumerate(cut_into_rounds(piece.box.length, rounds)):
            if 0 not in box.length:
                found[number].append(piece._replace(box=_placed(box, piece.box)))
    return found


def _placed(box: Box, outer: Box) -> Box:
    """A box that was counted from the first element of another, counted as that one
    is."""
    return Box(
        tuple([start + at for start, at in zip(outer.start, box.start, strict=True)]),
        box.length,
    )


def _one_round(
    step: AllToAll,
    sends: Sequence[Piece],
    receives: Sequence[Piece],
    own: int,
    group: Group,
) -> _Round:
    sent, received = (
        [piece for piece in pieces if piece.member != own]
        for pieces in (sends, receives)
    )
    kept = next((piece.box for piece in sends if piece.member == own), None)
    outgoing, incoming = splits(sent, group), splits(received, group)
    pack = never_nothing(
        pack_pieces(sent, group), outgoing, incoming, group, group.places[own]
    )
    send = swap(outgoing, incoming, group, _functional.wait_tensor)
    landing = offsets(receives, incoming, group, own)

    def exchange(local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return send(pack(local, whole))

    def land(whole: torch.Tensor, came: torch.Tensor, local: torch.Tensor) -> None:
        combine(
            whole, came, landing, step.op, None if kept is None else part(local, kept)
        )

    return _Round(exchange, land)


def reduce_scatter_in_rounds(step: ReduceScatter, here: Here, group: Group) -> Local:
    """The whole of a reduce-scatter whose pieces are all alike."""
    pieces = sorted(
        step.pieces(here.coordinate), key=lambda piece: group.places[piece.member]
    )
    rounds = cut_into_rounds(here.wanted.length, step.rounds)
    op, size, name = step.op, step.ranks, group.name

    def reduced(pieces: list[torch.Tensor]) -> torch.Tensor:
        return _functional.wait_tensor(
            _functional.reduce_scatter_tensor(joined(pieces), op, size, name)
        )

    def run(local: torch.Tensor) -> torch.Tensor:
        whole = local.new_empty(here.wanted.length)
        for some in rounds:
            target = part(whole, some)
            target.copy_(
                reduced(
                    [part(local, _placed(some, piece.box)) for piece in pieces]
                ).view(target.shape)
            )
        return whole

    return run
