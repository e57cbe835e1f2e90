"""Rounds: a large exchange runs part by part, so that what is packed and what arrives take no more than the source.

An exchange over several axes at once may bring a rank many times what it holds, as pieces that lie one after the other
until they are put in their places. One axis at a time has less to hold. So each piece of a large one is cut into about
equal parts, and each round moves one part of every piece: the same elements to the same ranks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from .boxes import Box
from .cost import arriving, leaving
from .regions import cut_last
from .steps import AllToAll, Collective, Narrow, ReduceScatter, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cost import Cost


def in_rounds(steps: tuple[Step, ...], itemsize: int, cost: Cost) -> tuple[Step, ...]:
    """The same steps, the large ones in rounds."""
    if _bytes(steps, itemsize) < 2 * cost.round_bytes:
        return steps
    views = [False, *[isinstance(step, Narrow) for step in steps]]
    return tuple([_in_rounds(step, is_view, itemsize, cost) for step, is_view in zip(steps, views)])


def in_one_round(steps: tuple[Step, ...], *kinds: type[AllToAll | ReduceScatter]) -> tuple[Step, ...]:
    """The same steps, those of these kinds in one round."""
    return tuple([dataclasses.replace(step, rounds=1) if isinstance(step, kinds) else step for step in steps])


def _bytes(steps: tuple[Step, ...], itemsize: int) -> int:
    """Of the whole tensor, if anything is sent."""
    step = next((step for step in steps if isinstance(step, Collective)), None)
    return 0 if step is None else math.prod(step.before.shape) * itemsize


def _in_rounds(step: Step, is_view: bool, itemsize: int, cost: Cost) -> Step:
    """In so many rounds that none holds more than the rank has (about as much where cuts are uneven), or for a
    reduce-scatter half of what it would pack, but with so many bytes in each that it is worth one.

    Args:
        is_view: the step begins with a part of a local tensor.
    """
    if not isinstance(step, (AllToAll, ReduceScatter)) or len(step.axes) == 1:
        return step  # one axis: redistributing one mesh dim after the other holds as much
    if isinstance(step, AllToAll):
        staged, room = arriving(step) + leaving(step), step.before.most
    elif (is_view or cut_last(step.before, step.after, step.axes) != 0) and step.after.is_even:
        packed = step.ranks * step.chunk
        staged, room = packed + step.chunk, packed // 2
    else:
        return step  # where dim 0 is cut nothing is packed; uneven pieces are padded, and can't be cut all alike
    rounds = min(-(-staged // max(room, 1)), staged * itemsize // cost.round_bytes)
    # Rounded up to a power of two: most dims can be cut evenly into that many.
    return dataclasses.replace(step, rounds=1 << (rounds - 1).bit_length()) if rounds > 1 else step


def parts(length: Sequence[int], rounds: int) -> list[Box]:
    """A piece of these lengths in as many parts as there are rounds, along the first dim that is long enough.

    >>> [box.start for box in parts((2, 6), 3)]
    [(0, 0), (0, 2), (0, 4)]
    """
    dim = next((d for d, n in enumerate(length) if n >= rounds), None)
    if dim is None:
        dim = max(range(len(length)), key=lambda d: length[d])
    found = []
    for number in range(rounds):
        start, end = (length[dim] * at // rounds for at in (number, number + 1))
        found.append(
            Box(
                (*[0] * dim, start, *[0] * (len(length) - dim - 1)),
                (*length[:dim], end - start, *length[dim + 1 :]),
            )
        )
    return found
