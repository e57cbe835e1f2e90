"""Find out which tensors of one rank share memory, and so which sources a run would overwrite before it reads them.

A source and a target may be views of one storage, as when experts move between ranks in place. Where an element of the
source lies at the address of the same element of the target, nothing is written to it. Everywhere else the source must
be copied before the first write. Start at `Shared.of`. Standard library only.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ...distributed.tensor._planner.boxes import Box

TRIED = 10_000  # after so many combinations of coordinates, two views count as overlapping


class Memory(NamedTuple):
    """Where the elements of a strided view lie, in bytes.

    Attributes:
        address: of the first element. Strides of torch aren't negative, so no element lies below it.
        length: the number of elements, for each dim.
        stride: the distance of two neighbours, for each dim.
        itemsize: of one element.
    """

    address: int
    length: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + sum([s * (n - 1) for n, s in zip(self.length, self.stride)]) + self.itemsize

    def shares_bytes(self, other: Memory) -> bool:
        """True if some byte belongs to both views, neither of which is empty.

        Exact, except that views for which the search takes too long (TRIED) count as sharing. A shared byte is a
        solution of address + sum(stride * coordinate) + byte of the element, equal for both views. With the coordinates
        of `other` counted from its end, all terms are positive, and the question is whether they can add up to one
        number.

        >>> rows = Memory(0, (4, 2), (8, 1), 1)  # the first two columns of a matrix with eight
        >>> rows.shares_bytes(Memory(2, (4, 6), (8, 1), 1)), rows.shares_bytes(Memory(1, (4, 6), (8, 1), 1))
        (False, True)
        """
        if self.end <= other.address or other.end <= self.address:
            return False
        terms: dict[int, int] = {}
        for memory in (self, other):
            steps = [*zip(memory.stride, memory.length), (1, memory.itemsize)]
            for stride, length in steps:
                if stride and length > 1:
                    terms[stride] = terms.get(stride, 0) + length - 1
        return _is_sum(sorted(terms.items(), reverse=True), other.end - 1 - self.address)


def _is_sum(terms: Sequence[tuple[int, int]], total: int) -> bool:
    """True if sum(stride * factor) can be `total`, for factors from 0 to the one given with each stride. Also True if
    that isn't known after TRIED tries.

    Tries factors from the largest stride on, and stops where the terms that are left can make every sum: `most[k]` is
    the largest sum of the terms from k on, and if `is_dense[k]` they make each number up to it.
    """
    most, is_dense = [0], [True]
    for stride, factor in reversed(terms):
        is_dense.insert(0, is_dense[0] and stride <= most[0] + 1)
        most.insert(0, most[0] + stride * factor)
    open_sums, tried = [(0, total)], 0
    while open_sums:
        at, rest = open_sums.pop()
        if not 0 <= rest <= most[at]:
            continue
        if is_dense[at]:
            return True
        tried += 1
        if tried > TRIED:
            return True
        stride, factor = terms[at]
        least = max(-(-(rest - most[at + 1]) // stride), 0)
        open_sums += [(at + 1, rest - stride * times) for times in range(least, min(factor, rest // stride) + 1)]
    return False


class HeldBox(NamedTuple):
    """A box of a tensor that one rank holds, and where it lies in memory.

    Attributes:
        name: of the whole tensor.
        dtype: its name.
        box: of the whole tensor; it isn't empty.
        memory: of the local tensor, which has the shape of the box.
    """

    name: str
    dtype: str
    box: Box
    memory: Memory

    def lies_alike(self, other: HeldBox) -> bool:
        """True if it is certain that both are parts of one tensor that lies in one place: each element that both have
        is at the same address, and no byte belongs to two elements.

        Then a run may write the elements that `self` lacks without a copy of those that it has. It is true if one
        linear function gives the address of each element from its position in the whole tensor, for both parts, and
        gives different addresses for any two positions in the smallest box around both. False also where that can't be
        told, as of two single elements.
        """
        if (self.name, self.dtype) != (other.name, other.dtype):
            return False
        origin, steps = other.memory.address - self.memory.address, []
        for dim, (start, other_start) in enumerate(zip(self.box.start, other.box.start)):
            length, other_length = self.box.length[dim], other.box.length[dim]
            reach = max(start + length, other_start + other_length) - min(start, other_start)
            if reach == 1:
                continue  # one position, whatever its stride
            strides = {m.stride[dim] for m, n in ((self.memory, length), (other.memory, other_length)) if n > 1}
            if len(strides) != 1:
                return False  # they differ; or two single positions, which nothing relates
            (stride,) = strides
            origin -= stride * (other_start - start)
            steps.append((stride, reach - 1))
        if origin:
            return False
        reached = self.memory.itemsize
        for stride, times in sorted(steps):
            if stride < reached:
                return False
            reached += stride * times
        return True


class Shared(NamedTuple):
    """Which tensors of one rank share memory, in the three ways that matter for a run.

    Attributes:
        overwritten: for the index of a source, the indices of the targets that are written where it lies.
        clashes: pairs of names of targets that overlap without being the same block: one would spoil the other.
        tied: names of targets that are one and the same block, as tied weights are.
    """

    overwritten: dict[int, set[int]]
    clashes: list[tuple[str, str]]
    tied: list[tuple[str, ...]]

    @staticmethod
    def of(sources: Mapping[int, HeldBox], targets: Mapping[int, HeldBox]) -> Shared:
        """Compare the parts that a rank reads and writes."""
        known: dict[tuple[bool, HeldBox], list[int]] = {}
        for is_target, parts in ((False, sources), (True, targets)):
            for number, part in parts.items():
                known.setdefault((is_target, part), []).append(number)
        overwritten: dict[int, set[int]] = {}
        clashes: set[tuple[str, str]] = set()
        blocks: dict[object, set[str]] = {}
        for one, other in _overlapping_spans(known):
            if not (one[0] or other[0]):
                continue  # two sources, which are only read
            if one[0] and other[0]:
                names = tuple(sorted({one[1].name, other[1].name}))
                if one[1][1:] == other[1][1:] and len(names) == 2:
                    blocks.setdefault(one[1].memory, set()).update(names)
                elif not one[1].lies_alike(other[1]) and one[1].memory.shares_bytes(other[1].memory):
                    clashes.add((names[0], names[-1]))
                continue
            source, target = (one, other) if other[0] else (other, one)
            if not source[1].lies_alike(target[1]) and source[1].memory.shares_bytes(target[1].memory):
                for number in known[source]:
                    overwritten.setdefault(number, set()).update(known[target])
        return Shared(overwritten, sorted(clashes), sorted({tuple(sorted(names)) for names in blocks.values()}))


NOTHING_SHARED = Shared({}, [], [])


def _overlapping_spans(
    parts: Collection[tuple[bool, HeldBox]],
) -> Iterator[tuple[tuple[bool, HeldBox], tuple[bool, HeldBox]]]:
    """Yield each pair of parts whose spans of addresses overlap. Two columns of a matrix do, and share no byte."""
    begun = itertools.count()  # tells apart parts of one end, since parts themselves have no order
    open_parts: list[tuple[int, int, tuple[bool, HeldBox]]] = []  # a heap, by end
    for part in sorted(parts, key=lambda item: item[1].memory.address):
        memory = part[1].memory
        while open_parts and open_parts[0][0] <= memory.address:
            heapq.heappop(open_parts)
        for _, _, earlier in open_parts:
            yield earlier, part
        heapq.heappush(open_parts, (memory.end, next(begun), part))
