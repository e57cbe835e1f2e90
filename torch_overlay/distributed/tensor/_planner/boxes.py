"""Boxes: axis-parallel blocks of a tensor, in elements, and the chunk rule that cuts them.

A `Box` is what one rank holds of a global tensor; everything a redistribution copies, sends or receives is a box.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Box(NamedTuple):
    """A block of a tensor: its first element and its length along each dim, in elements.

    A box with a zero length is empty, wherever it starts; two empty boxes hold the same elements (none) although
    they need not be equal.
    """

    start: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements the box holds; 1 for the box of a tensor without dims."""
        return math.prod(self.length)

    def meet(self, other: Box) -> Box:
        """The elements in both boxes, as a box; empty if they don't meet."""
        start = tuple(map(max, self.start, other.start))
        length = tuple(
            max(0, min(a + n, b + m) - s)
            for s, a, n, b, m in zip(start, self.start, self.length, other.start, other.length)
        )
        return Box(start, length)

    def inside(self, outer: Box) -> Box:
        """The same box, counted from the first element of `outer`: where it is in the tensor that holds `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start)), self.length)

    def then(self, other: Box) -> Box | None:
        """Both as one box, if its elements, row-major, are those of this one and then those of the other."""
        for dim, length in enumerate(self.length):
            inner = dim + 1
            if other.start[dim] == self.start[dim] + length:
                if self.start[inner:] != other.start[inner:] or self.length[inner:] != other.length[inner:]:
                    return None
                return Box(self.start, (*self.length[:dim], length + other.length[dim], *self.length[inner:]))
            if length != 1 or (other.start[dim], other.length[dim]) != (self.start[dim], 1):
                return None
        return None


def in_runs(placed: Iterable[tuple[int | None, Box]]) -> list[tuple[int | None, Box]]:
    """The same boxes and where each begins in a flat tensor, with those as one that follow one another there and are
    one box; what has no place stays as it is.

    >>> in_runs([(0, Box((0, 0), (2, 3))), (6, Box((2, 0), (1, 3))), (10, Box((3, 0), (1, 3)))])
    [(0, Box(start=(0, 0), length=(3, 3))), (10, Box(start=(3, 0), length=(1, 3)))]
    """
    found: list[tuple[int | None, Box]] = []
    end: int | None = None
    for at, box in placed:
        both = found[-1][1].then(box) if at is not None and at == end else None
        if both is None:
            found.append((at, box))
        else:
            found[-1] = found[-1][0], both
        end = None if at is None else at + box.elements
    return found


def chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of piece `part` when `length` elements are cut into at most `parts` pieces.

    All pieces have the length of the first, rounded up, until the elements run out: the last pieces may be shorter or
    empty. This is the rule of `torch.chunk`, with the pieces that it leaves out given as empty ones at the end.

    >>> [chunk(5, 4, i) for i in range(4)]  # 2 + 2 + 1 + 0, not 2 + 1 + 1 + 1
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-length // parts)
    start = min(part * step, length)
    return start, min(step, length - start)


def longest(length: int, parts: Sequence[int]) -> int:
    """The length of the longest piece when `length` elements are cut into `parts[0]` pieces, each of these into
    `parts[1]`, and so on: that of the first piece.

    >>> longest(9, (2, 2))  # 5 and 4, which are 3, 2, 2 and 2
    3
    """
    for count in parts:
        length = -(-length // count)
    return length


def lengths(length: int, parts: Sequence[int]) -> set[int]:
    """The different lengths of all these pieces. The shortest need not come from the shortest one before: 5 in 4 gives
    a 0, 4 in 4 doesn't.

    >>> sorted(lengths(9, (2, 2)))
    [2, 3]
    """
    found = {length}
    for count in parts:
        found = set().union(*[_chunk_lengths(one, count) for one in found])
    return found


def _chunk_lengths(length: int, parts: int) -> set[int]:
    step = -(-length // parts)
    if step * parts == length:
        return {step}
    whole, rest = divmod(length, step)
    found = {step, rest} if rest else {step}
    return found if whole + bool(rest) == parts else found | {0}


def runs(length: int, parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pieces that aren't empty, from first to last: a length, and how many one after the other have it. Each run is
    as long as it can be, so that equal cuts have equal runs however they are made.

    >>> [*runs(7, (4,))], [*runs(7, (2, 2))], [*runs(24, (2, 3, 2))]
    ([(2, 3), (1, 1)], [(2, 3), (1, 1)], [(2, 12)])
    """
    for one, equal in itertools.groupby(_runs(length, parts), key=lambda run: run[0]):
        yield one, sum(count for _, count in equal)


def _runs(length: int, parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    whole = math.prod(parts)
    if length % whole == 0:
        if length:
            yield length // whole, whole
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
    """Whether both ways to cut leave the same pieces, apart from empty ones. Takes time only where the first pieces
    are equally long, and then as much as there are runs.

    >>> same_pieces(7, (4,), (2, 2)), same_pieces(6, (4,), (2, 2))  # 2, 2, 2; or 2, 1, 2, 1
    (True, False)
    """
    if one == other:
        return True
    if longest(length, one) != longest(length, other):
        return False
    return all(a == b for a, b in itertools.zip_longest(runs(length, one), runs(length, other)))
