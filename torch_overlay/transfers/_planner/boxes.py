"""Geometry of boxes that transfers need: what is left of a box, which boxes meet, runs of elements as boxes, stripes.

`Box` itself is `distributed/tensor/_planner/boxes.py`. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from ...distributed.tensor._planner.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


EVEN = 16  # with so many elements of a dim for each stripe, the longest stripe is at most 1/16 longer than the shortest
ROWS = 256  # a part with so many rows is cut between rows; one with fewer rows, within a row


def without(boxes: Iterable[Box], hole: Box) -> list[Box]:
    """Cut a box out of boxes. Returns what is left, as boxes.

    >>> without([Box((0, 0), (3, 3))], Box((1, 1), (1, 9)))
    [Box(start=(0, 0), length=(1, 3)), Box(start=(2, 0), length=(1, 3)), Box(start=(1, 0), length=(1, 1))]
    """
    left: list[Box] = []
    for box in boxes:
        cut = box.meet(hole)
        if not cut.elements:
            left.append(box)
            continue
        # In each dim, split off what lies before and behind the hole. The box shrinks to the hole, dim by dim.
        start, length = [*box.start], [*box.length]
        for dim, (first, count) in enumerate(zip(*cut)):
            end, beyond = first + count, start[dim] + length[dim]
            for low, high in ((start[dim], first), (end, beyond)):
                if low < high:
                    left.append(
                        Box((*start[:dim], low, *start[dim + 1 :]), (*length[:dim], high - low, *length[dim + 1 :]))
                    )
            start[dim], length[dim] = first, count
    return left


class Boxes:
    """An index over boxes that finds those which meet another box.

    They are sorted by their start in the dim in which they have the most different starts, and bisected there.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        dims = range(len(boxes[0].start) if boxes else 0)
        # The dim in which they differ most tells them apart best: dim 0 for rows, dim 1 for columns.
        self._dim = max(dims, key=lambda dim: len({box.start[dim] for box in boxes}), default=None)
        if self._dim is not None:
            dim = self._dim
            self._order = sorted(range(len(boxes)), key=lambda number: boxes[number].start[dim])
            self._starts = [boxes[number].start[dim] for number in self._order]
            self._longest = max([box.length[dim] for box in boxes], default=0)

    def meeting(self, box: Box) -> list[int]:
        """Return the indices of the boxes that have an element in common with a box, ascending."""
        if self._dim is None:
            near: Iterable[int] = range(len(self._boxes))
        else:
            # A box that starts further ahead than the longest one is long ends before this one.
            low = bisect_left(self._starts, box.start[self._dim] - self._longest + 1)
            high = bisect_left(self._starts, box.start[self._dim] + box.length[self._dim])
            near = sorted(self._order[low:high])
        return [number for number in near if self._boxes[number].meet(box).elements]


def place_in(part: Box, box: Box) -> int:
    """Return how many elements of a box lie in the parts before this one, if a grid cuts the box into parts. Neither is
    empty.

    Needs no other part: see the formula of `begin` in routes.py, above `Line`.
    """
    place, left, before = 0, box.elements, 1
    for start, length, outer, whole in zip(part.start, part.length, box.start, box.length):
        left //= whole
        place += before * (start - outer) * left
        before *= length
    return place


def grain_of(part: Box) -> int:
    """Return the elements of a part that always go together: those of a row, if the part has at least ROWS rows.

    Senders and receivers then copy whole rows. Rows are taken over as many dims as make ROWS of them.
    """
    rows, grain = 1, part.elements
    for length in part.length:
        if rows >= ROWS:
            break
        rows *= length
        grain //= length
    return grain


def blocks(box: Box, first: int, last: int) -> list[Box]:
    """Cover the elements from `first` to `last - 1` of a box, counted row-major, with boxes in that order. Empty if
    there are none.

    >>> blocks(Box((0, 0), (4, 3)), 2, 9)  # the end of the first row, then two rows
    [Box(start=(0, 2), length=(1, 1)), Box(start=(1, 0), length=(2, 3))]
    """
    if first >= last:
        return []
    if (first, last) == (0, box.elements):
        return [box]
    (start, *starts), (_, *lengths) = box
    row = math.prod(lengths)
    inner = Box(tuple(starts), tuple(lengths))
    (top, skipped), (bottom, left) = divmod(first, row), divmod(last, row)
    if top == bottom:
        return _at(start + top, blocks(inner, skipped, left))
    boxes: list[Box] = []
    if skipped:  # the end of the first row
        boxes += _at(start + top, blocks(inner, skipped, row))
        top += 1
    if top < bottom:  # whole rows
        boxes.append(Box((start + top, *starts), (bottom - top, *lengths)))
    return boxes + _at(start + bottom, blocks(inner, 0, left))  # the beginning of the last row


def _at(place: int, boxes: list[Box]) -> list[Box]:
    """Give boxes one more dim in front, in which each has length 1 and starts at `place`."""
    return [Box((place, *box.start), (1, *box.length)) for box in boxes]


def stripes(box: Box, count: int) -> list[Box]:
    """Cut a box along one dim into `count` boxes whose lengths there differ by at most one; fewer if no dim is so long.

    The dim is the first one that gives nearly equal stripes, since a stripe of rows is contiguous in memory.

    >>> from torch_overlay.distributed.tensor._planner.regions import Box
    >>> stripes(Box((0, 0), (2, 6)), 3)
    [Box(start=(0, 0), length=(2, 2)), Box(start=(0, 2), length=(2, 2)), Box(start=(0, 4), length=(2, 2))]
    """
    if count == 1 or box.elements < 2:
        return [box]
    lengths = box.length
    even = [dim for dim, length in enumerate(lengths) if length % count == 0 or length >= EVEN * count]
    dim = even[0] if even else max(range(len(lengths)), key=lengths.__getitem__)
    count, start = min(count, lengths[dim]), box.start[dim]
    ends = [lengths[dim] * number // count for number in range(count + 1)]
    return [
        box._replace(
            start=(*box.start[:dim], start + low, *box.start[dim + 1 :]),
            length=(*lengths[:dim], high - low, *lengths[dim + 1 :]),
        )
        for low, high in itertools.pairwise(ends)
    ]
