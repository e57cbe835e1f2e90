"""Boxes: axis-parallel blocks of a tensor, in elements, and the chunk rule that cuts them.

A `Box` is what one rank holds of a global tensor; everything a redistribution copies, sends or receives is a box.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def shortest(length: int, parts: Sequence[int]) -> int:
    """The length of the shortest piece when `length` elements are cut into `parts[0]` pieces, each of these into
    `parts[1]`, and so on. It need not come from the shortest one before: 5 in 4 gives a 0, 4 in 4 doesn't.

    >>> shortest(9, (2, 2))  # 5 and 4, which are 3, 2, 2 and 2
    2
    """
    for depth, count in enumerate(parts):
        if length % count:
            lengths = {length}
            for more in parts[depth:]:
                lengths = set().union(*[chunk_lengths(n, more) for n in lengths])
            return min(lengths)
        length //= count
    return length


def chunk_lengths(length: int, parts: int) -> set[int]:
    """The different lengths that the pieces of `chunk` have.

    >>> sorted(chunk_lengths(5, 4))
    [0, 1, 2]
    """
    step = -(-length // parts)
    if step * parts == length:
        return {step}
    whole, rest = divmod(length, step)
    found = {step, rest} if rest else {step}
    return found if whole + bool(rest) == parts else found | {0}
