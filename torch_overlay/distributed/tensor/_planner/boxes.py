"""Boxes, and how `torch.chunk` cuts a dim.

A `Box` is an axis-parallel block of the global tensor, in elements. Whatever a
redistribution copies, sends or receives is a box.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class _BoxFields(NamedTuple):
    start: tuple[int, ...]
    length: tuple[int, ...]


class Box(_BoxFields):
    """A block of a tensor: its first element, and its length along each dim, in
    elements.

    A box with a zero length is empty, wherever it starts. Two empty boxes hold the same
    elements (none) but may compare unequal.
    """

    @cached_property
    def elements(self) -> int:
        """The number of elements; 1 for the box of a tensor without dims."""
        return math.prod(self.length)

    def meet(self, other: Box) -> Box:
        """Return the box of the elements in both; empty if they don't overlap."""
        start = tuple(map(max, self.start, other.start))
        length = tuple(
            max(0, min(a + n, b + m) - s)
            for s, a, n, b, m in zip(
                start, self.start, self.length, other.start, other.length
            )
        )
        return Box(start, length)

    def inside(self, outer: Box) -> Box:
        """Return this box counted from the first element of `outer`, which contains
        it."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start)), self.length)

    def then(self, other: Box) -> Box | None:
        """Return both as one box, if its elements, row-major, are this one's and then
        the `other`'s."""
        for dim, length in enumerate(self.length):
            inner = dim + 1
            if other.start[dim] == self.start[dim] + length:
                if (
                    self.start[inner:] != other.start[inner:]
                    or self.length[inner:] != other.length[inner:]
                ):
                    return None
                return Box(
                    self.start,
                    (
                        *self.length[:dim],
                        length + other.length[dim],
                        *self.length[inner:],
                    ),
                )
            # Along a dim longer than 1 the rows of `other` would have to lie between
            # those of this box.
            if length != 1 or (other.start[dim], other.length[dim]) != (
                self.start[dim],
                1,
            ):
                return None
        return None


def in_runs(placed: Iterable[tuple[int | None, Box]]) -> list[tuple[int | None, Box]]:
    """Merge boxes that are neighbours both in the tensor and in a flat buffer, so that
    one copy moves them. An offset of None is outside of the buffer, and never merged.

    >>> one, two, apart = Box((0, 0), (2, 3)), Box((2, 0), (1, 3)), Box((3, 0), (1, 3))
    >>> in_runs([(0, one), (6, two), (10, apart)])
    [(0, Box(start=(0, 0), length=(3, 3))), (10, Box(start=(3, 0), length=(1, 3)))]
    """
    merged: list[tuple[int | None, Box]] = []
    end: int | None = None
    for offset, box in placed:
        union = (
            merged[-1][1].then(box) if offset is not None and offset == end else None
        )
        if union is None:
            merged.append((offset, box))
        else:
            merged[-1] = merged[-1][0], union
        end = None if offset is None else offset + box.elements
    return merged


def chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return start and length of piece `part` of `parts`, by the rule of `torch.chunk`:
    the first length is rounded up, until the elements run out. `torch.chunk` leaves out
    empty pieces; here they lie at the end.

    >>> [chunk(5, 4, i) for i in range(4)]  # 2 + 2 + 1 + 0, not 2 + 1 + 1 + 1
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-length // parts)
    start = min(part * step, length)
    return start, min(step, length - start)


def longest(length: int, parts: Sequence[int]) -> int:
    """Return the length of the longest piece when `length` elements are cut into
    `parts[0]` pieces, each of these into `parts[1]`, and so on. It is the first piece.

    >>> longest(9, (2, 2))  # 5 and 4, which are 3, 2, 2 and 2
    3
    """
    for count in parts:
        length = -(-length // count)
    return length


def lengths(length: int, parts: Sequence[int]) -> set[int]:
    """Return the different lengths of the pieces when `length` elements are cut into
    `parts[0]` pieces, each of these into `parts[1]`, and so on, 0 among them if one is
    empty. The shortest need not come from the shortest: of 5 elements in four pieces
    one is empty, of 4 none.

    >>> sorted(lengths(9, (2, 2)))
    [2, 3]
    """
    pieces = {length}
    for count in parts:
        pieces = set().union(*[_chunk_lengths(piece, count) for piece in pieces])
    return pieces


def _chunk_lengths(length: int, parts: int) -> set[int]:
    """`lengths` of one cut."""
    step = -(-length // parts)
    if step * parts == length:
        return {step}
    full, rest = divmod(length, step)
    pieces = {step, rest} if rest else {step}
    return pieces if full + bool(rest) == parts else pieces | {0}


def runs(length: int, parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pieces that aren't empty as runs: a length, and how many in a row have
    it. Runs are as long as possible, so equal cuts give equal runs, however nested.

    >>> [*runs(7, (4,))], [*runs(7, (2, 2))], [*runs(24, (2, 3, 2))]
    ([(2, 3), (1, 1)], [(2, 3), (1, 1)], [(2, 12)])
    """
    for piece, neighbours in itertools.groupby(
        _runs(length, parts), key=lambda run: run[0]
    ):
        yield piece, sum(count for _, count in neighbours)


def _runs(length: int, parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of `runs`, except that neighbours may have the same length."""
    pieces = math.prod(parts)
    # Even cuts in constant time; there may be 131,072 pieces.
    if length % pieces == 0:
        if length:
            yield length // pieces, pieces
        return
    step, inner = -(-length // parts[0]), parts[1:]
    full, rest = divmod(length, step)
    if step % math.prod(inner) == 0:
        yield step // math.prod(inner), full * math.prod(inner)
    else:
        for _ in range(full):
            yield from _runs(step, inner)
    if rest:
        yield from _runs(rest, inner)


def same_pieces(length: int, one: Sequence[int], other: Sequence[int]) -> bool:
    """True if both ways to cut give the same pieces, apart from empty ones.

    >>> same_pieces(7, (4,), (2, 2)), same_pieces(6, (4,), (2, 2))  # 2,2,2; 2,1,2,1
    (True, False)
    """
    if one == other:
        return True
    # Decides almost every case: listing the runs of a long dim takes longer.
    if longest(length, one) != longest(length, other):
        return False
    return all(
        a == b for a, b in itertools.zip_longest(runs(length, one), runs(length, other))
    )
