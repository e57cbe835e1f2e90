"""Groups: which sets of mesh axes have a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


@dataclass(frozen=True, slots=True)
class Groups:
    """Which joint groups exist: all (`axes` is None), or these axis tuples and every single axis.

    >>> groups = Groups.of([(0, 1), (0, 1, 2)], sizes=(2, 3, 4))
    >>> groups.within((0, 1)), groups.between((1,), (0, 1)), groups.cover((0, 1, 2))
    ([(0, 1), (1,), (0,)], [(1,), (0, 1)], [(0, 1, 2)])
    """

    sizes: tuple[int, ...]
    axes: frozenset[tuple[int, ...]] | None = None

    @staticmethod
    def of(axes: Iterable[Iterable[int]] | None, sizes: tuple[int, ...]) -> Groups:
        """Sorted, and without axes of size 1."""
        if axes is None:
            return Groups(sizes)
        joint = (tuple(sorted(a for a in group if sizes[a] > 1)) for group in axes)
        return Groups(sizes, frozenset(group for group in joint if len(group) > 1))

    def has(self, axes: Collection[int]) -> bool:
        """Is there a group over exactly these axes? Over none, none is needed."""
        return len(axes) <= 1 or self.axes is None or tuple(sorted(axes)) in self.axes

    def count(self, axes: Iterable[int]) -> int:
        """How many ranks a group over these axes has."""
        return math.prod(self.sizes[a] for a in axes)

    def within(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """All groups over some of these axes (not empty), the biggest first. Where all groups
        exist, only the biggest and those of single axes: of the others none would be taken before the biggest."""
        joint = [tuple(sorted(axes))] if self.axes is None else [g for g in self.axes if set(g).issubset(axes)]
        return sorted({*joint, *((a,) for a in axes)}, key=lambda group: (-self.count(group), group))

    def between(self, least: Collection[int], most: Collection[int]) -> list[tuple[int, ...]]:
        """All groups over all axes of `least` and perhaps more of `most`, the smallest first. Where all groups exist,
        only those over exactly `least`, with least latency, and exactly `most`, in which most ranks can send."""
        ends = [tuple(sorted(axes)) for axes in (least, most)]
        found = {group for group in ends if self.has(group)}
        if self.axes is not None:
            found.update([g for g in self.axes if set(g).issuperset(least) and set(g).issubset(most)])
        return sorted(found, key=lambda group: (self.count(group), group))

    def cover(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """Disjoint groups over all of these axes, the biggest first."""
        left, found = set(axes), []
        while left:
            found.append(self.within(left)[0])
            left.difference_update(found[-1])
        return found
