"""Costs: what the busiest rank of a step gets and sends, the seconds that takes, and
the choice between plans.

The same numbers on every rank: nothing here depends on a coordinate.

Groups: which sets of mesh axes have a process group.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from .regions import Box, cut_last, least_overlap, longest
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Narrow,
    ReduceScatter,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from .steps import Diagonal, Digit, Exchange


@dataclass(frozen=True, slots=True)
class Groups:
    """Which joint groups exist: all (`axes` is None), or these axis tuples and every
    single axis.

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
        """All groups over some of these axes (not empty), the biggest first. Where all
        groups exist, only the biggest and those of single axes: of the others none
        would be taken before the biggest."""
        joint = (
            [tuple(sorted(axes))]
            if self.axes is None
            else [g for g in self.axes if set(g).issubset(axes)]
        )
        return sorted(
            {*joint, *((a,) for a in axes)},
            key=lambda group: (-self.count(group), group),
        )

    def between(
        self, least: Collection[int], most: Collection[int]
    ) -> list[tuple[int, ...]]:
        """All groups over all axes of `least` and perhaps more of `most`, the smallest
        first. Where all groups exist, only those over exactly `least`, with least
        latency, and exactly `most`, in which most ranks can send."""
        ends = [tuple(sorted(axes)) for axes in (least, most)]
        found = {group for group in ends if self.has(group)}
        if self.axes is not None:
            found.update(
                [
                    g
                    for g in self.axes
                    if set(g).issuperset(least) and set(g).issubset(most)
                ]
            )
        return sorted(found, key=lambda group: (self.count(group), group))

    def cover(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """Disjoint groups over all of these axes, the biggest first."""
        left, found = set(axes), []
        while left:
            found.append(self.within(left)[0])
            left.difference_update(found[-1])
        return found


Steps = tuple[Step, ...]
# what a byte costs in an all-to-all, if it costs 1 in another collective; assumed
EXCHANGE = 1.25


@dataclass(frozen=True, slots=True)
class Cost:
    """What a collective costs: latency, and over the bandwidth (bytes per second and
    rank) the bytes that the busiest rank gets or those that the busiest rank sends,
    whichever is more.

    The defaults are assumptions of the right order for a few hosts, not measurements.

    Attributes:
        latency: seconds that a collective of two ranks takes without data, plus half of
            that each time their number doubles.
        round_bytes: a round of a large exchange has more than half as many bytes, sent
            and received together.
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
        return (
            sum(self.fixed_and_moving(step, itemsize))
            if isinstance(step, Collective)
            else 0.0
        )

    def fixed_and_moving(self, step: Collective, itemsize: int) -> tuple[float, float]:
        """The seconds that a collective takes without data, and those for its bytes."""
        weight = EXCHANGE if isinstance(step, AllToAll) else 1.0
        size = max(arriving(step), leaving(step)) * itemsize
        rounds = step.rounds if isinstance(step, (AllToAll, ReduceScatter)) else 1
        return rounds * self.latency * (
            1 + math.log2(step.ranks)
        ) / 2, weight * size / self.bandwidth

    def fastest(self, plans: Sequence[Steps], itemsize: int) -> Steps:
        """The fastest of the plans; of equals the one with fewer collectives, then
        fewer bytes, then the first."""
        if len(plans) == 1:
            return plans[0]
        return min(plans, key=lambda plan: self.key(plan, itemsize))

    def key(self, plan: Steps, itemsize: int) -> tuple[float, int, int]:
        """What `fastest` compares."""
        talking = [step for step in plan if isinstance(step, Collective)]
        # `fsum` gives the same for the same terms in any order; to twelve digits, so
        # that plans which take as long by other terms are nearly always equal.
        terms = [
            term for step in talking for term in self.fixed_and_moving(step, itemsize)
        ]
        seconds = float(f"{math.fsum(terms):.12g}")
        return seconds, len(talking), arriving_by(talking)


# By type of device; of others, as for the CPU. Those for GPUs are taken over, until
# they are measured on one.
_ASSUMED: Mapping[str, Cost] = MappingProxyType({"cpu": Cost(), "cuda": Cost()})


def collectives(plan: Iterable[Step]) -> int:
    """How many steps of a plan communicate."""
    return sum(isinstance(step, Collective) for step in plan)


def arriving_by(plan: Iterable[Step]) -> int:
    """The elements that a plan brings to the busiest rank of each step."""
    return sum(map(arriving, plan))


def arriving(step: Step) -> int:
    """The elements that a step brings to the busiest rank, or more where cuts are
    uneven; 0 for a local step."""
    if isinstance(step, AllToAll):
        terms = math.prod([step.before.sizes[a] for a in step.reduced])
        return terms * step.after.most - least_overlap(step.before, step.after)
    return (
        step.received if isinstance(step, (AllGather, AllReduce, ReduceScatter)) else 0
    )


def leaving(step: Step) -> int:
    """The elements that the busiest rank sends in a step, or more where not all dims
    are aligned (see `most_sent`); 0 for a local step."""
    if isinstance(step, AllToAll):
        return most_sent(
            step.exchange, step.diagonals, least_overlap(step.before, step.after)
        )
    return arriving(step)


# --- What the busiest rank of an all-to-all sends ---
# A rank sends to one receiver for each coordinate on the shard axes; the receiver's
# coordinates on the replica axes follow from the sender's, or from the diagonal. It
# sends each receiver a product of overlaps, one for each dim. So all that it sends is
# at most a product, too: of what it sends along each dim (`_most_along`), and of the
# number of receivers that want the same. No rank is looked at.


def most_sent(
    exchange: Exchange, diagonals: Collection[Diagonal], least_kept: int
) -> int:
    """The elements that the busiest rank sends to others: exact where all dims are
    aligned, see `_aligned`, else not less than that, but for a few elements at the ends
    of uneven chunks.

    From R·S0 to S0·R on (2, 2), sender and receiver have the same coordinate on axis 0,
    and the receiver has any on axis 1: (0, 0) and (1, 1) send what they hold to two
    ranks, one of them themselves. On a diagonal the receiver's coordinate on axis 1
    follows from that on axis 0: each rank sends what it holds to one.

    Args:
        least_kept: what every rank, at least, wants of what it holds already.
    """
    before, after, shards = exchange.before, exchange.after, exchange.shards
    paired = {diagonal.replica for diagonal in diagonals}
    used = {diagonal.shard for diagonal in diagonals}
    alike = exchange.cuts(
        [axis for axis in exchange.axes if axis in shards and axis not in after.sharded]
    )
    sent = math.prod([digit.base for digit in alike if digit not in used])
    # In a pair of bases 2 (replica) and 5 (shard), one value of the replica digit goes
    # with up to 3 of the shard digit.
    sent *= math.prod([-(-shard.base // replica.base) for replica, shard in diagonals])
    dims = range(len(before.shape))
    for dim in dims:
        sent *= _most_along(exchange, dim, paired, used)
    nearest = not paired and all(_aligned(exchange, dim) for dim in dims)
    return sent - max(least_kept, _kept(exchange) if nearest else 0)


def _most_along(
    exchange: Exchange, dim: int, paired: Collection[Digit], used: Collection[Digit]
) -> int:
    """Along one dim, the most elements that a rank sends, summed over all receivers
    that differ in what they want.

    On a replica axis that isn't `paired`, sender and receiver have the same coordinate.
    On every other digit that cuts the target (`summed`) all values are counted; on an
    axis outside the group only the sender's own overlaps. But the value of the `used`
    digits of shard axes follows from the digit that they are paired with.
    """
    cuts = exchange.cuts(exchange.after.orders[dim])
    same = [
        digit
        for digit in cuts
        if digit.axis not in exchange.shards and digit not in paired
    ]
    summed = [digit for digit in cuts if digit not in same and digit not in used]
    if len(summed) == len(cuts):
        # the parts of all receivers cover what a rank holds once
        return exchange.before.longest[dim]
    length, levels = exchange.after.shape[dim], []
    for axis in exchange.after.orders[dim]:
        length = longest(length, [exchange.after.sizes[axis]])
        levels += [
            (length * digit.unit, digit in summed)
            for digit in cuts
            if digit.axis == axis
        ]
    return _most_within(exchange.before.longest[dim], levels)


def _most_within(elements: int, levels: Sequence[tuple[int, bool]]) -> int:
    """Of so many elements in a row, the most that lie where some digits have one value
    each. The levels are the digits from the most significant on: the elements over
    which one stays as it is, and whether all its values count.

    From R·S0 to S0·S0 on (2, 2), eight elements: rank (0, 0) holds four in a row, and
    sends those where axis 0 is at 0, which are four in a row, too; axis 1, over two
    elements each, has any value.

    >>> _most_within(4, [(4, False), (2, True)])
    4

    Six of eight, where the first digit has any value, and the second, over two elements
    each, only one:

    >>> _most_within(6, [(4, True), (2, False)])
    4
    """
    for depth, (block, counts) in enumerate(levels):
        if not counts:
            elements = min(elements, block)
        elif elements > block > 0:
            whole, rest = divmod(elements, block)
            inner = levels[depth + 1 :]
            return whole * _most_within(block, inner) + _most_within(rest, inner)
    return elements


def _kept(exchange: Exchange) -> int:
    """The least that a rank which sends at all wants of what it holds, by nearest
    senders and where cuts are aligned: the shorter of both boxes along each dim. But 0
    if the new cut has a digit of a shard axis at a place where the old cut has another:
    from S0·S1 to S1·S0 on (2, 2), rank (0, 1) holds the first half of dim 0 and wants
    the second. A dim that is cut as before, even if unevenly, scales what is sent and
    what is kept alike."""
    before, after = exchange.before, exchange.after
    for old, new in zip(before.orders, after.orders):
        for held, wanted in zip(exchange.cuts(old), exchange.cuts(new)):
            if wanted.axis in exchange.shards and wanted != held:
                return 0
    return math.prod(
        [
            min(before.longest[dim], after.longest[dim])
            for dim in range(len(before.shape))
        ]
    )


def _aligned(exchange: Exchange, dim: int) -> bool:
    """Whether this dim is cut as before; or evenly, and the digits of both cuts have
    the same bases, one after the other, as far as the shorter cut goes."""
    before, after = exchange.before, exchange.after
    orders = before.orders[dim], after.orders[dim]
    if orders[0] == orders[1]:
        return True
    old, new = map(exchange.cuts, orders)
    if any(a.base != b.base for a, b in zip(old, new)):
        return False
    longer = max(old, new, key=len)  # the other is its beginning
    return before.shape[dim] % math.prod([digit.base for digit in longer]) == 0


# --- Rounds ---
# An exchange over several axes at once may bring a rank many times what it holds, as
# pieces that lie one after the other until they are put in their places; one axis at a
# time has less to hold. So a large exchange cuts each piece into about equal parts, and
# each round moves one part of every piece: the same elements to the same ranks, and
# what is packed and what arrives take no more than the source.


def in_rounds(steps: tuple[Step, ...], itemsize: int, cost: Cost) -> tuple[Step, ...]:
    """The same steps, the large ones in rounds."""
    if bytes_of(steps, itemsize) < 2 * cost.round_bytes:
        return steps
    return tuple(
        [
            _in_rounds(step, is_view, itemsize, cost)
            for step, is_view in with_views(steps)
        ]
    )


def with_views(steps: Sequence[Step]) -> Iterator[tuple[Step, bool]]:
    """Each step, and whether it begins with a part of a local tensor."""
    return zip(steps, [False, *[isinstance(step, Narrow) for step in steps]])


def in_one_round(
    steps: tuple[Step, ...], *kinds: type[AllToAll | ReduceScatter]
) -> tuple[Step, ...]:
    """The same steps, those of these kinds in one round."""
    return tuple(
        [
            dataclasses.replace(step, rounds=1) if isinstance(step, kinds) else step
            for step in steps
        ]
    )


def bytes_of(steps: Sequence[Step], itemsize: int) -> int:
    """Of the whole tensor, if anything is sent."""
    step = next((step for step in steps if isinstance(step, Collective)), None)
    return 0 if step is None else math.prod(step.before.shape) * itemsize


def _in_rounds(step: Step, is_view: bool, itemsize: int, cost: Cost) -> Step:
    """In so many rounds that none holds more than there is room for, but with so many
    bytes in each that it is worth one."""
    if not isinstance(step, (AllToAll, ReduceScatter)):
        return step
    staged, most = staged_and_most_rounds(step, is_view)
    rounds = min(most, staged * itemsize // cost.round_bytes)
    # Rounded up to a power of two: most dims can be cut evenly into that many.
    return (
        dataclasses.replace(step, rounds=1 << (rounds - 1).bit_length())
        if rounds > 1
        else step
    )


def staged_and_most_rounds(
    step: AllToAll | ReduceScatter, is_view: bool
) -> tuple[int, int]:
    """The elements that a step packs and receives; and the rounds in which it holds no
    more of them at once than the rank has (about as much where cuts are uneven), or for
    a reduce-scatter half of what it would pack.

    Args:
        is_view: the step begins with a part of a local tensor.
    """
    if len(step.axes) == 1:
        # one axis: redistributing one mesh dim after the other holds as much
        return 0, 1
    if isinstance(step, AllToAll):
        staged, room = arriving(step) + leaving(step), step.before.most
    elif (
        is_view or cut_last(step.before, step.after, step.axes) != 0
    ) and step.after.is_even:
        packed = step.ranks * step.chunk
        staged, room = packed + step.chunk, packed // 2
    else:
        # where dim 0 is cut nothing is packed; uneven pieces are padded, and can't be
        # cut all alike
        return 0, 1
    return staged, -(-staged // max(room, 1))


def parts(length: Sequence[int], rounds: int) -> list[Box]:
    """A piece of these lengths in as many parts as there are rounds, along the first
    dim that is long enough.

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
