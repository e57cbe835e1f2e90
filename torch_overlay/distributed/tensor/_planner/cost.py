"""Costs: what the busiest rank of a step gets and sends, the seconds that takes, and the choice between plans.

The same numbers on every rank: nothing here depends on a coordinate.

Groups: which sets of mesh axes have a process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from .regions import least_overlap
from .senders import most_sent
from .steps import AllGather, AllReduce, AllToAll, Collective, ReduceScatter, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


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


Steps = tuple[Step, ...]
EXCHANGE = 1.25  # what a byte costs in an all-to-all, if it costs 1 in another collective; assumed


@dataclass(frozen=True, slots=True)
class Cost:
    """What a collective costs: latency, and over the bandwidth (bytes per second and rank) the bytes that the busiest
    rank gets or those that the busiest rank sends, whichever is more.

    The defaults are assumptions of the right order for a few hosts, not measurements.

    Attributes:
        latency: seconds that a collective of two ranks takes without data, plus half of that each time their number
            doubles.
        round_bytes: a round of a large exchange has more than half as many bytes, sent and received together.
    """

    latency: float = 30e-6
    bandwidth: float = 10e9
    round_bytes: int = 16 << 20

    @staticmethod
    def of(device: str) -> Cost:
        """What is assumed of the groups of a type of device."""
        return _ASSUMED.get(device, _ASSUMED["cpu"])

    def seconds(self, step: Step, itemsize: int) -> float:
        """The time of one step; local steps are free."""
        return sum(self.fixed_and_moving(step, itemsize)) if isinstance(step, Collective) else 0.0

    def fixed_and_moving(self, step: Collective, itemsize: int) -> tuple[float, float]:
        """The seconds that a collective takes without data, and those for its bytes."""
        weight = EXCHANGE if isinstance(step, AllToAll) else 1.0
        size = max(arriving(step), leaving(step)) * itemsize
        rounds = step.rounds if isinstance(step, (AllToAll, ReduceScatter)) else 1
        return rounds * self.latency * (1 + math.log2(step.ranks)) / 2, weight * size / self.bandwidth

    def fastest(self, plans: Sequence[Steps], itemsize: int) -> Steps:
        """The fastest of the plans; of equals the one with fewer collectives, then fewer bytes, then the first."""
        if len(plans) == 1:
            return plans[0]
        return min(plans, key=lambda plan: self.key(plan, itemsize))

    def key(self, plan: Steps, itemsize: int) -> tuple[float, int, int]:
        """What `fastest` compares."""
        talking = [step for step in plan if isinstance(step, Collective)]
        # `fsum` gives the same for the same terms in any order; to twelve digits, so that plans which take as long by
        # other terms are nearly always equal.
        terms = [term for step in talking for term in self.fixed_and_moving(step, itemsize)]
        seconds = float(f"{math.fsum(terms):.12g}")
        return seconds, len(talking), arriving_by(talking)


# By type of device; of others, as for the CPU. Those for GPUs are taken over, until they are measured on one.
_ASSUMED: Mapping[str, Cost] = MappingProxyType({"cpu": Cost(), "cuda": Cost()})


def collectives(plan: Iterable[Step]) -> int:
    """How many steps of a plan communicate."""
    return sum(isinstance(step, Collective) for step in plan)


def arriving_by(plan: Iterable[Step]) -> int:
    """The elements that a plan brings to the busiest rank of each step."""
    return sum(map(arriving, plan))


def arriving(step: Step) -> int:
    """The elements that a step brings to the busiest rank, or more where cuts are uneven; 0 for a local step."""
    if isinstance(step, AllToAll):
        terms = math.prod([step.before.sizes[a] for a in step.reduced])
        return terms * step.after.most - least_overlap(step.before, step.after)
    return step.received if isinstance(step, (AllGather, AllReduce, ReduceScatter)) else 0


def leaving(step: Step) -> int:
    """The elements that the busiest rank sends in a step, or more where not all dims are aligned (see `most_sent`); 0
    for a local step."""
    if isinstance(step, AllToAll):
        return most_sent(step.exchange, step.diagonals, least_overlap(step.before, step.after))
    return arriving(step)
