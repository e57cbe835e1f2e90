"""Run an all-to-all or a reduce-scatter in rounds: pack what each member gets,
exchange, and unpack, with a reduction of the terms if there is one. Start reading at
`all_to_all_by_size`.

For example, the rows of a 4 x 4 tensor become columns on four ranks. Each rank packs
its row as four pieces of one element, sends one to each member of the group, itself
included, and makes a column of the four that arrive.

If all pieces have the same shape, packing and unpacking is a view, a permute and a
copy, see `Grid`. Otherwise each piece is copied by itself.

Of a large message, the rank's own part isn't sent. It stays in the local tensor until
the others' parts have arrived, so it is copied once and takes no room in the buffers. A
very large message goes in rounds: one part of each piece is packed, sent and put into
its place before the next one.
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
from .._planner.boxes import Box, in_runs
from .._planner.cost import cut_into_rounds
from .._planner.grids import grids, talkers
from .._planner.regions import OPS

if TYPE_CHECKING:
    from .._planner.grids import Grid
    from .._planner.steps import AllToAll, Coordinate, PeerBox, ReduceScatter
    from .at_hand import Group


# --- Packing and unpacking one flat tensor ---

Local = Callable[[torch.Tensor], torch.Tensor]
# The first takes a local tensor, each other one what the one before it returned.
Stages = tuple[Callable[[Any], Any], ...]
# The offset of each box in a flat tensor; None if the box isn't in it.
Blocks = Sequence[tuple[int | None, Box]]

# The dtypes that NCCL and Gloo move. Others travel as bytes.
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

# By device type, the bytes from which on one more copy of a message costs more than a
# few more calls. Other device types have the figure of the CPU, which was measured.
# That for GPUs isn't measured yet.
LARGE_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 1 << 20, "cuda": 1 << 20})


def is_large(tensor: torch.Tensor, elements: int) -> bool:
    """True if saving a copy of so many elements is worth more calls. Only for plain
    tensors that may be changed in place: not for a Parameter, or another subclass."""
    if type(tensor) is not torch.Tensor:
        return False
    device = "cpu" if tensor.is_cpu else tensor.device.type
    threshold = LARGE_BYTES[device] if device in LARGE_BYTES else LARGE_BYTES["cpu"]
    return elements * tensor.element_size() >= threshold and may_change(tensor)


def may_change(tensor: torch.Tensor) -> bool:
    """True if a tensor that nobody else has may be changed in place: not under a
    dispatch mode, nor while tracing, nor if autograd records it."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or _are_we_tracing()
        or (tensor.requires_grad and torch.is_grad_enabled())
    )


def may_fill(shape: Sequence[Any]) -> bool:
    """True if a new tensor may be filled by writes: not under a dispatch mode.
    Selective activation checkpointing refuses what `new_empty` returned once it was
    written. While tracing it may: a compiler takes the writes out, and blocks of
    symbolic sizes can't be put in order."""
    return (
        not torch._C._len_torch_dispatch_stack()
        or _are_we_tracing()
        or not all(type(length) is int for length in shape)
    )


class Here(NamedTuple):
    """Where a step runs.

    Attributes:
        coordinate: the coordinate of this rank.
        held, wanted: the boxes of this rank before and after the step.
    """

    coordinate: Coordinate
    held: Box
    wanted: Box


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a tensor that a box, counted from its start, selects."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def nothing_of(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of this shape, without elements, that depends on another one, for
    a compiler to see. AOTAutograd drops a collective that nothing depends on as dead
    code, and its partitioner runs one that depends on nothing in the forward and the
    backward graph. Other ranks run it once, and would wait."""
    return tensor.reshape(-1).narrow(0, 0, 0).view(shape)


def flattened(local: torch.Tensor) -> torch.Tensor:
    """Return all elements in a contiguous flat tensor; a view if they are that already.
    `reshape` alone isn't enough: of a single column it makes a view with a stride."""
    return local.reshape(-1).contiguous()


def packing(grid: Grid) -> Local:
    """Make the function from the local tensor to flat parts for members, maybe a
    view."""
    lengths, expanded, order = grid
    if grid.plain:
        return flattened
    if expanded != lengths:
        return lambda local: flattened(
            local.reshape(lengths).expand(expanded).permute(order)
        )
    return lambda local: flattened(local.reshape(lengths).permute(order))


def unpacking(grid: Grid, shape: Sequence[int]) -> Local:
    """Make the function from what came, flat, to the local tensor, maybe a view."""
    lengths, _, order = grid
    if grid.plain:
        return lambda flat: flat.view(shape)
    return lambda flat: flat.view(lengths).permute(order).reshape(shape).contiguous()


def unpacking_in_place(grid: Grid, shape: Sequence[int]) -> Local:
    """Like `unpacking`, but where the outermost dims of what arrived are in place
    already, large blocks within these are permuted inside the received tensor, which is
    overwritten, so that a large tensor doesn't exist twice."""
    lengths, _, order = grid
    in_place_dims = next((i for i, dim in enumerate(order) if i != dim), len(order))
    blocks = math.prod(lengths[:in_place_dims])
    unpack = unpacking(grid, shape)
    if grid.plain or blocks == 1:
        return unpack
    inner = [dim - in_place_dims for dim in order[in_place_dims:]]

    def run(flat: torch.Tensor) -> torch.Tensor:
        if not is_large(flat, flat.numel() // blocks):
            return unpack(flat)
        for block in flat.view(blocks, *lengths[in_place_dims:]):
            # `reshape` may return a view of the block, which copy_ would overwrite
            # while reading; a clone never is one. It is freed before the next block.
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
    """Return a tensor assembled from blocks of a flat tensor: a view if they lie in
    place, unless that would keep more padding alive than the tensor has elements."""
    if not pieces:
        return nothing_of(flat, shape)
    joined_dim = _joined_along(pieces, shape)
    if (
        joined_dim is not None
        and flat.numel() <= 2 * math.prod(shape)
        and _in_place(pieces, joined_dim, shape)
    ):
        # A view: the padding behind it stays in memory, too.
        return flat.narrow(0, 0, math.prod(shape)).view(shape)
    views = [view_of(flat, at, box, kept) for at, box in pieces]
    if joined_dim is None:
        if not may_fill(shape):
            return tiled([(box, view) for view, (_, box) in zip(views, pieces)])
        whole = flat.new_empty(shape)
        for view, (_, box) in zip(views, pieces, strict=True):
            part(whole, box).copy_(view)
        return whole
    return (
        torch.cat(views, joined_dim).contiguous()
        if len(views) > 1
        else views[0].clone()
    )


def tiled(blocks: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """Return a new tensor of these blocks, which fill it, without writing in place."""
    if len(blocks) == 1:
        return blocks[0][1].clone(memory_format=torch.contiguous_format)
    return _joined_by_cuts([block for block in blocks if block[0].elements])


def _joined_by_cuts(blocks: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    """`tiled` of blocks none of which is empty. One block is returned as it is."""
    if len(blocks) == 1:
        return blocks[0][1]
    for dim in range(len(blocks[0][0].length)):
        parts: list[list[tuple[Box, torch.Tensor]]] = []
        end = -1
        for block in sorted(blocks, key=lambda block: block[0].start[dim]):
            start = block[0].start[dim]
            if start >= end:
                parts.append([])
            parts[-1].append(block)
            end = max(end, start + block[0].length[dim])
        if len(parts) > 1:
            return torch.cat([_joined_by_cuts(part) for part in parts], dim)
    raise AssertionError(f"no cut parts {[box for box, _ in blocks]}")


def view_of(
    flat: torch.Tensor, at: int | None, box: Box, kept: torch.Tensor | None
) -> torch.Tensor:
    """Return a box as a view of the flat tensor from `at` on, or of `kept` if None."""
    if at is None:
        assert kept is not None, "a block without an offset stayed here"  # noqa: S101
        return kept
    return flat.narrow(0, at, box.elements).view(box.length)


def _in_place(pieces: Blocks, dim: int, shape: Sequence[int]) -> bool:
    """True if boxes that follow one another along a dim lie in `flat` as in the
    result."""
    if math.prod(shape[:dim]) != 1:
        return False
    return [at for at, _ in pieces] == [
        0,
        *itertools.accumulate(box.elements for _, box in pieces),
    ][:-1]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate blocks into one flat tensor, each in row-major order. A single
    contiguous block of at least one dim gives a view."""
    if parts[0].ndim and all(part.shape[1:] == parts[0].shape[1:] for part in parts):
        return flattened(torch.cat(parts) if len(parts) > 1 else parts[0])
    lengths = [part.numel() for part in parts]
    if not is_large(parts[0], sum(lengths)) or all(
        part.is_contiguous() for part in parts
    ):
        return torch.cat([part.reshape(-1) for part in parts])
    # To flatten blocks that aren't contiguous, and then join them, would copy them
    # twice.
    flat = parts[0].new_empty(sum(lengths))
    torch._foreach_copy_(
        [piece.view(part.shape) for piece, part in zip(flat.split(lengths), parts)],
        parts,
    )
    return flat


def _joined_along(pieces: Blocks, shape: Sequence[int]) -> int | None:
    """Return the dim along which boxes follow one another and fill the shape, or
    None."""
    for dim in range(len(shape)):
        end = 0
        for _, box in pieces:
            same_otherwise = all(
                n == m
                for d, (n, m) in enumerate(zip(box.length, shape, strict=True))
                if d != dim
            )
            if not same_otherwise or box.start[dim] != end:
                break
            end += box.length[dim]
        else:
            if end == shape[dim]:
                return dim
    return None


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return the elements as bytes, which share memory with `flat` where they can. The
    last dim, which there must be, is as many times longer as an element has bytes."""
    plain = flat.resolve_conj().resolve_neg().contiguous()
    # `view` needs stride 1. A last dim of length 1 counts as contiguous with any
    # stride.
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


# The offset of a piece in what arrived, or None; its box; True if it is reduced into
# the box instead of written.
Landing = tuple[int | None, "Box", bool]


def all_to_all(step: AllToAll, here: Here, group: Group, finish: Local) -> Stages:
    """Make the functions that pack, exchange and unpack: by one permute if all pieces
    have the same shape, otherwise piece by piece."""
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
    # No grid: uneven shards, or a group whose ranks are in another order.
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
    """Make the function that exchanges flat tensors by these splits, in elements.
    Dtypes that backends don't move travel as bytes."""

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


def pack_pieces(sends: Sequence[PeerBox], group: Group) -> Callable[..., torch.Tensor]:
    """Make the function that packs the pieces which this rank sends, in the order of
    the group's ranks, from the local tensor and any others. Without pieces it returns
    an empty tensor that depends on all its arguments (`unread`); a single contiguous
    piece is a view."""
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


def unread(*tensors: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that depends on all the given tensors. Two exchanges of
    the same empty tensor look alike to a compiler, which would run one of them; the
    other ranks, which send something, would wait for the second."""
    return torch.cat([tensor.reshape(-1).narrow(0, 0, 0) for tensor in tensors])


def landing(
    step: AllToAll,
    receives: Sequence[PeerBox],
    receive_splits: Sequence[int],
    group: Group,
    shape: Sequence[int],
    own: int | None = None,
) -> Callable[..., torch.Tensor]:
    """Make the function from what arrived to the local tensor."""
    pieces = offsets(receives, receive_splits, group, own)
    op = step.op
    if op is None:
        blocks = in_runs([(at, box) for at, box, _ in pieces])
        return lambda flat, kept=None: assembled(flat, blocks, shape, kept)
    return lambda flat, kept=None: _reduce_terms(flat, pieces, shape, op, kept)


def reducing(grid: Grid, axes: int, op: str, shape: Sequence[int]) -> Local:
    """Make the function that reduces the terms that arrived, in one order on all
    ranks."""
    reduce, (lengths, _, order) = _reduce_function(op), grid
    term_indices = list(
        itertools.product(*[range(lengths[dim]) for dim in order[:axes]])
    )

    def run(flat: torch.Tensor) -> torch.Tensor:
        terms = flat.view(lengths).permute(order)
        total = terms[term_indices[0]].clone(memory_format=torch.contiguous_format)
        out = may_change(flat)
        for index in term_indices[1:]:
            total = (
                reduce(total, terms[index], out=total)
                if out
                else reduce(total, terms[index])
            )
        return total.reshape(shape)

    return run


def offsets(
    receives: Sequence[PeerBox],
    receive_splits: Sequence[int],
    group: Group,
    own: int | None,
) -> list[Landing]:
    """Return where each piece lies in what arrived; None for the member `own`'s."""
    starts = [0, *itertools.accumulate(receive_splits)]
    return [
        (
            starts[group.places[piece.member]] if piece.member != own else None,
            piece.box,
            piece.add,
        )
        for piece in receives
    ]


def _reduce_terms(
    flat: torch.Tensor,
    pieces: Sequence[Landing],
    shape: Sequence[int],
    op: str,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    """Return a new tensor with the terms that arrived in `flat` reduced by `op`."""
    if not pieces:
        return nothing_of(flat, shape)
    if not may_fill(shape):
        terms: dict[Box, torch.Tensor] = {}
        add_terms(terms, flat, pieces, op, kept)
        return tiled([*terms.items()])
    whole = flat.new_empty(shape)
    combine(whole, flat, pieces, op, kept)
    return whole


def add_terms(
    terms: dict[Box, torch.Tensor],
    flat: torch.Tensor,
    pieces: Sequence[Landing],
    op: str | None,
    kept: torch.Tensor | None,
) -> None:
    """Put every piece at its box in `terms`, or reduce it with what is there:
    `combine`, in the same order, with nothing written in place."""
    reduce = _reduce_function(op or "sum")
    for at, box, add in pieces:
        term = view_of(flat, at, box, kept)
        terms[box] = reduce(terms[box], term) if add else term


def combine(
    whole: torch.Tensor,
    flat: torch.Tensor,
    pieces: Sequence[Landing],
    op: str | None,
    kept: torch.Tensor | None,
) -> None:
    """Write or reduce every piece into its box of the contiguous `whole`, in place, in
    one order on all ranks."""
    if all(at is None for at, _, _ in pieces) and _are_we_tracing():
        # Nothing that arrived is read. AOTAutograd would drop the exchange as dead
        # code, and the other ranks would wait for this one.
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


def splits(pieces: Sequence[PeerBox], group: Group) -> list[int]:
    """Return how many elements go to, or come from, each rank, in the group's order."""
    counts = [0] * len(group.places)
    for piece in pieces:
        counts[group.places[piece.member]] += piece.box.elements
    return counts


class Apart(NamedTuple):
    """A large message whose own part stays in the local tensor.

    Attributes:
        flat: what goes to the other ranks, or came from them.
        own: this rank's part, a view of the local tensor, which must not change before
            `land` has read it.
        exchange: sends and receives `flat`.
        land: makes the new local tensor from `flat` and `own`.
    """

    flat: torch.Tensor
    own: torch.Tensor
    exchange: Local
    land: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def all_to_all_by_size(
    step: AllToAll, here: Here, group: Group, finish: Local
) -> Stages:
    """Make the functions that pack, exchange and unpack. A large message travels
    without the rank's own part, a small one as a whole, which takes fewer calls."""
    pack, exchange, land = all_to_all(step, here, group, finish)
    elements = max(here.held.elements, here.wanted.elements)
    # Made when the first large tensor comes: many programs never see one.
    pack_apart = functools.cache(lambda: _pack_apart(step, here, group, finish))

    def start(local: torch.Tensor) -> torch.Tensor | Apart:
        apart = pack_apart() if is_large(local, elements) else None
        return pack(local) if apart is None else apart(local)

    def send(sent: torch.Tensor | Apart) -> torch.Tensor | Apart:
        return (
            sent._replace(flat=sent.exchange(sent.flat))
            if isinstance(sent, Apart)
            else exchange(sent)
        )

    def end(received: torch.Tensor | Apart) -> torch.Tensor:
        return (
            received.land(received.flat, received.own)
            if isinstance(received, Apart)
            else land(received)
        )

    return start, send, end


def _pack_apart(
    step: AllToAll, here: Here, group: Group, finish: Local
) -> Callable[[torch.Tensor], Apart] | None:
    """Make the function that packs what goes to others and leaves the rank's own part
    in the local tensor. None if nothing stays, leaves or comes: then `all_to_all` packs
    all."""
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
    """The functions of one round.

    Attributes:
        exchange: packs from the local tensor, exchanges, and returns what arrived. It
            also takes the result so far, for `unread` to depend on.
        land: writes what arrived, and this rank's own part, into the result, by
            `combine`; or puts them beside the terms so far, by `add_terms`.
    """

    exchange: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    land: Callable[[Any, torch.Tensor, torch.Tensor], None]


def all_to_all_in_rounds(step: AllToAll, here: Here, group: Group) -> Local:
    """Make the function that runs a whole all-to-all in rounds, and waits in each."""
    own = step.member(here.coordinate)
    sends = _in_parts(step.sends(here.coordinate), step.rounds)
    receives = _in_parts(step.receives(here.coordinate), step.rounds)
    rounds = [
        _one_round(step, *pieces, own, group)
        for pieces in zip(sends, receives, strict=True)
    ]

    def run(local: torch.Tensor) -> torch.Tensor:
        shape = here.wanted.length
        if not may_fill(shape):
            terms: dict[Box, torch.Tensor] = {}
            for exchange, land in rounds:
                land(terms, exchange(local, local), local)
            return tiled([*terms.items()]) if terms else nothing_of(local, shape)
        whole = local.new_empty(shape)
        for exchange, land in rounds:
            land(whole, exchange(local, whole), local)
        return whole

    return run


def _in_parts(pieces: Sequence[PeerBox], rounds: int) -> list[list[PeerBox]]:
    """Return which parts of these pieces each round moves, unless empty, in their
    order."""
    by_round: list[list[PeerBox]] = [[] for _ in range(rounds)]
    for piece in pieces:
        for number, box in enumerate(cut_into_rounds(piece.box.length, rounds)):
            if 0 not in box.length:
                by_round[number].append(piece._replace(box=_placed(box, piece.box)))
    return by_round


def _placed(box: Box, outer: Box) -> Box:
    """Turn a box that counts from the start of `outer` into one that counts as it
    does."""
    return Box(
        tuple([start + at for start, at in zip(outer.start, box.start, strict=True)]),
        box.length,
    )


def _one_round(
    step: AllToAll,
    sends: Sequence[PeerBox],
    receives: Sequence[PeerBox],
    own: int,
    group: Group,
) -> _Round:
    """Make the functions of one round: the exchange, which waits, and the unpack."""
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

    def land(whole: Any, received: torch.Tensor, local: torch.Tensor) -> None:
        put = add_terms if isinstance(whole, dict) else combine
        own_part = None if kept is None else part(local, kept)
        put(whole, received, landing, step.op, own_part)

    return _Round(exchange, land)


def reduce_scatter_in_rounds(step: ReduceScatter, here: Here, group: Group) -> Local:
    """Make the function that reduce-scatters pieces of one shape in rounds, and
    waits."""
    pieces = sorted(
        step.pieces(here.coordinate), key=lambda piece: group.places[piece.member]
    )
    rounds = cut_into_rounds(here.wanted.length, step.rounds)
    op, size, name = step.op, step.ranks, group.name

    def reduce_scatter(pieces: list[torch.Tensor]) -> torch.Tensor:
        return _functional.wait_tensor(
            _functional.reduce_scatter_tensor(joined(pieces), op, size, name)
        )

    def reduced(local: torch.Tensor, box: Box) -> torch.Tensor:
        terms = [part(local, _placed(box, piece.box)) for piece in pieces]
        return reduce_scatter(terms).view(box.length)

    def run(local: torch.Tensor) -> torch.Tensor:
        if not may_fill(here.wanted.length):
            return tiled([(box, reduced(local, box)) for box in rounds])
        whole = local.new_empty(here.wanted.length)
        for box in rounds:
            part(whole, box).copy_(reduced(local, box))
        return whole

    return run
