"""`TensorMove`: one tensor, or one pair of its pieces, from source to target. All ranks list the moves in one order.

Two functions list the moves: of tensors (`moves_of`), and of a checkpoint (`moves_of_checkpoint`).
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..distributed._mesh.text import of_ranks
from ._planner.piece_moves import Pieced, PieceMove
from ._planner.routes import Move
from ._planner.sides import Ranks, Side
from .checkpoint import ReadBox
from .comparison import raise_if_any
from .relays import NO_RELAY, Passing, end_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..distributed.tensor._planner.boxes import Box
    from ._planner.relay import Relay
    from ._planner.schedule import AnyMove
    from .checkpoint import Contents, Stretch
    from .descriptions import Tensor
    from .sharding import Sharding

    Pair = tuple[tuple[int, int], AnyMove, int]  # numbers of pieces, the move, the round


UNCOVERED = "The source of a transfer isn't whole"


class TensorMove(NamedTuple):
    """A tensor, or one pair of its pieces, on the way from the source to the target.

    Attributes:
        numbers: the number of the source's piece and that of the target's piece, on every rank that has such pieces; 0
            for a side that isn't in pieces.
        move: which rank sends which elements to whom.
        round: for a checkpoint, the round in which the source is read; with a relay, that of its first hop; else 0.
        local: for a checkpoint, what this rank reads for the move; None if it reads nothing for it.
    """

    tensor: Tensor
    numbers: tuple[int, int]
    move: AnyMove
    round: int = 0
    local: ReadBox | None = None


def moves_of(
    tensors: Sequence[Tensor], gone: frozenset[int], relays: Mapping[str, Sequence[Passing]]
) -> list[TensorMove]:
    """List the moves of these tensors, those of one tensor together; the same list on every rank."""
    ranks_of_mesh: dict[Any, Ranks] = {}
    # Tensors that all ranks describe alike have the same shardings, as objects.
    planned: dict[tuple[int, int, tuple[Passing, ...]], tuple[bool, list[Pair]]] = {}
    moves: list[TensorMove] = []
    problems: list[str | None] = []
    for tensor in tensors:
        passings = tuple(relays.get(tensor.name, NO_RELAY))
        key = id(tensor.source), id(tensor.target), passings
        if key not in planned:
            is_covered = uncovered_text(tensor, gone) is None
            planned[key] = is_covered, [*_pairs(tensor, gone, passings, ranks_of_mesh)] if is_covered else []
        is_covered, pairs = planned[key]
        if not is_covered:
            problems.append(uncovered_text(tensor, gone))
        moves += [TensorMove(tensor, numbers, move, round_) for numbers, move, round_ in pairs]
    raise_if_any([problem for problem in problems if problem is not None], why=UNCOVERED)
    return moves


def _pairs(
    tensor: Tensor, gone: frozenset[int], passings: Sequence[Passing], ranks_of_mesh: dict[Any, Ranks]
) -> Iterator[Pair]:
    """Yield the numbers, the move and the round of each pair of pieces of a tensor."""
    members = tensor.source.ranks + tensor.target.ranks
    for number, slab, relay in passings:
        # A tensor with a relay moves as pieces even between meshes: stripes are no shards of a mesh.
        if relay is None and slab is None and not (tensor.source.pieces or tensor.target.pieces):
            yield (0, 0), _mesh_move(tensor, ranks_of_mesh), number
            continue
        pieces = _pieced(tensor.source, tensor.target, gone, relay, slab)
        for numbers in _numbers_of(tensor, pieces):
            yield numbers, PieceMove(pieces, numbers, tensor.wire.itemsize, members), number


def own_moves(moves: Sequence[TensorMove], rank: int) -> list[int]:
    """Return the indices of the moves that a rank needs for its plans: of tensors in pieces, those of which it has some
    part; and all others, by which ranks compute how much each replica on a mesh sends."""
    is_own: dict[tuple[int, int], bool] = {}
    own = []
    for index, (tensor, _, move, *_) in enumerate(moves):
        key = id(tensor.source), id(tensor.target)
        if key not in is_own:
            is_own[key] = isinstance(move, Move) or rank in move.members
        if is_own[key]:
            own.append(index)
    return own


def uncovered_text(tensor: Tensor, gone: frozenset[int]) -> str | None:
    """Say which box of a tensor the pieces of its source leave out, in words; None if they cover it."""
    missing = _pieced(*tensor.sides, gone, None, None).missing() if tensor.source.pieces else None
    if missing is None:
        return None
    return (
        f"the pieces of {tensor.name!r}, of shape {tuple(tensor.source.regions.shape)}, leave out what starts at "
        f"{missing.start} and has shape {missing.length}"
    )


def _numbers_of(tensor: Tensor, pieces: Pieced) -> list[tuple[int, int]]:
    """Return the pairs of piece numbers of a tensor between which elements may move. (0, 0) is always there."""
    if not (tensor.source.pieces and tensor.target.pieces):
        # A side on a mesh has one piece, which may meet each of the other side's.
        source_numbers, target_numbers = (range(max(map(len, side.pieces), default=1)) for side in tensor.sides)
        return [*itertools.product(source_numbers, target_numbers)]
    return sorted({(0, 0), *pieces.pairs(zip(tensor.target.ranks, tensor.target.pieces))})


def moves_of_checkpoint(
    tensors: Sequence[Tensor],
    contents: Contents,
    shares: Sequence[Sequence[Sequence[Stretch]]],
    rank: int,
    relays: Mapping[str, Sequence[Passing]],
) -> list[TensorMove]:
    """List the moves from a checkpoint, those of a round together; the same on every rank, except for `local`."""
    # One tensor of the checkpoint may go to several targets, as tied weights do. It is read once.
    by_entry: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_entry.setdefault(contents.numbers[tensor.name], []).append(tensor)
    moves = []
    for number in range(max(map(len, shares))):
        parts: dict[int, dict[int, list[Stretch]]] = {}  # by entry and reader
        for reader, share in zip(contents.ranks, shares):
            for part in share[number] if number < len(share) else ():
                parts.setdefault(part.entry, {}).setdefault(reader, []).append(part)
        for entry, by_reader in sorted(parts.items()):
            # A part of a file is several boxes of its tensor if it begins or ends inside of a row. Each box is a piece.
            boxes = {reader: [*map(contents.boxes, some)] for reader, some in by_reader.items()}
            own = [
                ReadBox(part, begin, box.length)
                for part, of_part in zip(by_reader.get(rank, ()), boxes.get(rank, ()))
                for begin, box in zip(itertools.accumulate([box.elements for box in of_part], initial=0), of_part)
            ]
            ranks = sorted(by_reader)
            for tensor in by_entry[entry]:
                every = tuple([tuple(itertools.chain(*boxes[reader])) for reader in ranks])
                source = tensor.source._replace(ranks=tuple(ranks), pieces=every)
                ((_, _, relay),) = relays.get(tensor.name, NO_RELAY)
                pieces = _pieced(source, tensor.target, frozenset(), relay, None)
                members = source.ranks + tensor.target.ranks
                for piece, target in _numbers_of(tensor._replace(source=source), pieces):
                    move = PieceMove(pieces, (piece, target), tensor.wire.itemsize, members)
                    # Another reader may have more boxes of this tensor than this rank.
                    local = own[piece] if piece < len(own) else None
                    moves.append(TensorMove(tensor, (piece, target), move, number, local))
    return moves


def tensors_as_read(
    tensors: Iterable[Tensor], contents: Contents, shares: Sequence[Sequence[Sequence[Stretch]]]
) -> list[Tensor]:
    """Return the tensors of a checkpoint with the boxes that each reader reads, in any round, as the source's
    pieces."""
    as_read, boxes = [], contents.read_boxes(shares)
    for tensor in tensors:
        by_reader = boxes.get(contents.numbers[tensor.name], {})
        pieces = tuple([tuple(of_reader) for of_reader in by_reader.values()])
        as_read.append(tensor._replace(source=tensor.source._replace(ranks=tuple(by_reader), pieces=pieces)))
    return as_read


# Cached by value: the 128 experts of a layer have equal shardings under different names, and are planned once.
@lru_cache(maxsize=256)
def _pieced(source: Sharding, target: Sharding, gone: frozenset[int], relay: Relay | None, slab: Box | None) -> Pieced:
    """Plan a tensor of which a side is in pieces; with a relay, its first hop. Cached by value."""
    to = end_of(target, slab) if relay is None else relay.first
    return Pieced(tuple(source.regions.shape), end_of(source, slab), to, gone, (end_of(source), end_of(target)))


def _mesh_move(tensor: Tensor, ranks_of_mesh: dict[Any, Ranks]) -> Move:
    """Plan a tensor that lies on a mesh on both sides."""
    sides = []
    for sharding in tensor.sides:
        key = sharding.ranks, sharding.regions.sizes
        if key not in ranks_of_mesh:
            ranks_of_mesh[key] = Ranks.of(*key)
        sides.append(Side(sharding.regions, ranks_of_mesh[key]))
    return Move(sides[0], sides[1], tensor.wire.itemsize)


def check_nothing_is_lost(moves: Sequence[TensorMove], gone: frozenset[int]) -> None:
    """Check that ranks that are gone have no target, and that others have all elements of their sources."""
    lost, wanted = set[str](), set[str]()
    for tensor, _, move, *_ in moves if gone else ():
        if not gone.isdisjoint(tensor.source.ranks) and move.lost(gone):
            lost.add(tensor.name)
        if not gone.isdisjoint(tensor.target.ranks):
            wanted.add(tensor.name)
    who = of_ranks(sorted(gone)).capitalize()
    if wanted:
        names = ", ".join(map(repr, sorted(wanted)))
        raise ValueError(f"{who} left (gone=), and the targets {names} are there, too.")
    if lost:
        names = ", ".join(map(repr, sorted(lost)))
        raise ValueError(
            f"{who} left (gone=), and nobody else has some parts of {names}. "
            "Load these from a checkpoint, and leave them out here."
        )
