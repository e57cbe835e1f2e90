"""Costs: how many elements the busiest rank of a step receives and sends, how many
seconds that takes, and the choice between plans. Also which sets of axes have a process
group, and the rounds of large exchanges.

Nothing here depends on a coordinate, so all ranks compute the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from .boxes import Box, longest
from .regions import cut_last, least_overlap
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
    """Which joint groups exist: all, if `axes` is None; otherwise those over the sets
    in `axes`, and those over single axes.

    >>> groups = Groups.of([(0, 1), (0, 1, 2)], sizes=(2, 3, 4))
    >>> groups.within((0, 1)), groups.between((1,), (0, 1)), groups.cover((0, 1, 2))
    ([(0, 1), (1,), (0,)], [(1,), (0, 1)], [(0, 1, 2)])
    """

    sizes: tuple[int, ...]
    axes: frozenset[tuple[int, ...]] | None = None

    @staticmethod
    def of(axes: Iterable[Iterable[int]] | None, sizes: tuple[int, ...]) -> Groups:
        """Groups over these sets of axes, all if None, without axes of size 1 and sets
        of fewer than two others."""
        if axes is None:
            return Groups(sizes)
        joint = (tuple(sorted(a for a in group if sizes[a] > 1)) for group in axes)
        return Groups(sizes, frozenset(group for group in joint if len(group) > 1))

    def has(self, axes: Collection[int]) -> bool:
        """True if a group over exactly these axes exists, or none is needed."""
        return len(axes) <= 1 or self.axes is None or tuple(sorted(axes)) in self.axes

    def count(self, axes: Iterable[int]) -> int:
        """Return the number of ranks of a group over these axes."""
        return math.prod(self.sizes[a] for a in axes)

    def within(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """Return all groups over a subset of these axes, at least one, the largest
        first. If all groups exist, only the largest and those over single axes: a
        search that takes the first that fits would take the largest anyway."""
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
        """Return all groups over the axes in `least` and perhaps more from `most`, the
        smallest first. If all groups exist, only those over exactly `least`, with the
        least latency, and exactly `most`, in which most ranks can send."""
        extremes = [tuple(sorted(axes)) for axes in (least, most)]
        groups = {group for group in extremes if self.has(group)}
        if self.axes is not None:
            groups.update(
                [
                    g
                    for g in self.axes
                    if set(g).issuperset(least) and set(g).issubset(most)
                ]
            )
        return sorted(groups, key=lambda group: (self.count(group), group))

    def cover(self, axes: Collection[int]) -> list[tuple[int, ...]]:
        """Return disjoint groups that cover these axes, the largest first."""
        uncovered, groups = set(axes), []
        while uncovered:
            groups.append(self.within(uncovered)[0])
            uncovered.difference_update(groups[-1])
        return groups


Steps = tuple[Step, ...]
# The cost of a byte in an all-to-all, relative to other collectives. Assumed.
EXCHANGE = 1.25


@dataclass(frozen=True, slots=True)
class Cost:
    """What a collective costs: a latency, and the bytes that the busiest rank receives
    or those that the busiest rank sends, whichever is more, over the bandwidth.

    The defaults are assumptions of the right order for a few hosts, not measurements.

    Attributes:
        latency: seconds that a collective of two ranks takes without data. Each
            doubling of the number of ranks adds half of it.
        bandwidth: bytes per second and rank.
        round_bytes: a round of a large exchange has more than half as many bytes, sent
            and received together.
    """

    latency: float = 30e-6
    bandwidth: float = 10e9
    round_bytes: int = 16 << 20

    @staticmethod
    def of(device: str) -> Cost:
        """Return the cost model of a device type; the CPU's if it has no figures."""
        return _ASSUMED.get(device, _ASSUMED["cpu"])

    def seconds(self, step: Step, itemsize: int) -> float:
        """Return the seconds of one step; local steps are free."""
        return (
            sum(self.fixed_and_moving(step, itemsize))
            if isinstance(step, Collective)
            else 0.0
        )

    def fixed_and_moving(self, step: Collective, itemsize: int) -> tuple[float, float]:
        """Return the seconds of a collective without data, and those for its bytes."""
        weight = EXCHANGE if isinstance(step, AllToAll) else 1.0
        size = max(arriving(step), leaving(step)) * itemsize
        rounds = step.rounds if isinstance(step, (AllToAll, ReduceScatter)) else 1
        return rounds * self.latency * (
            1 + math.log2(step.ranks)
        ) / 2, weight * size / self.bandwidth

    def fastest(self, plans: Sequence[Steps], itemsize: int) -> Steps:
        """Return the fastest plan, of equals the one with fewer collectives, then with
        fewer bytes, then the first."""
        if len(plans) == 1:
            return plans[0]
        return min(plans, key=lambda plan: self.key(plan, itemsize))

    def key(self, plan: Steps, itemsize: int) -> tuple[float, int, int]:
        """What `fastest` compares: seconds, collectives, arriving elements."""
        communicating = [step for step in plan if isinstance(step, Collective)]
        # `fsum` gives the same sum for the same terms in any order. Twelve digits make
        # plans whose equal times come from different terms compare equal, nearly
        # always.
        terms = [
            term
            for step in communicating
            for term in self.fixed_and_moving(step, itemsize)
        ]
        seconds = float(f"{math.fsum(terms):.12g}")
        return seconds, len(communicating), arriving_by(communicating)


# By device type; others cost as the CPU does. The figures for GPUs aren't measured yet,
# they are those of the CPU.
_ASSUMED: Mapping[str, Cost] = MappingProxyType({"cpu": Cost(), "cuda": Cost()})


def collectives(plan: Iterable[Step]) -> int:
    """Return how many steps of a plan communicate."""
    return sum(isinstance(step, Collective) for step in plan)


def arriving_by(plan: Iterable[Step]) -> int:
    """Return the elements that the busiest rank of each step receives, summed."""
    return sum(map(arriving, plan))


def arriving(step: Step) -> int:
    """The elements that the busiest rank receives in a step; more if cuts are
    uneven."""
    if isinstance(step, AllToAll):
        terms = math.prod([step.before.sizes[a] for a in step.reduced])
        return terms * step.after.most - least_overlap(step.before, step.after)
    return (
        step.received if isinstance(step, (AllGather, AllReduce, ReduceScatter)) else 0
    )


def leaving(step: Step) -> int:
    """The elements that the busiest rank sends; more if `most_sent` isn't exact."""
    if isinstance(step, AllToAll):
        return most_sent(
            step.exchange, step.diagonals, least_overlap(step.before, step.after)
        )
    return arriving(step)


# --- What the busiest rank of an all-to-all sends ---
# A rank sends to one receiver for each coordinate on the shard axes. The receiver's
# coordinates on the replica axes are the sender's, or follow from the diagonal. What
# the rank sends to one receiver is a product of overlaps, one for each dim. So what it
# sends to all is at most a product, too: of what it sends along each dim
# (`_most_along`), and of the number of receivers that want the same. This takes no loop
# over ranks.


def most_sent(
    exchange: Exchange, diagonals: Collection[Diagonal], least_kept: int
) -> int:
    """Return the elements that the busiest rank sends to others. An upper bound, but
    for a few elements at the ends of uneven chunks, unless `_cuts_nest` holds for all
    dims.

    From R·S0 to S0·R on (2, 2), sender and receiver have the same coordinate on axis 0,
    and the receiver may have any on axis 1: (0, 0) and (1, 1) send what they hold to
    two ranks, one of which is the rank itself. On a diagonal the receiver's coordinate
    on axis 1 follows from that on axis 0, so each rank sends what it holds to one rank.
    """
    before, after, shards = exchange.before, exchange.after, exchange.shards
    paired = {diagonal.replica for diagonal in diagonals}
    used = {diagonal.shard for diagonal in diagonals}
    not_in_target = exchange.cuts(
        [axis for axis in exchange.axes if axis in shards and axis not in after.sharded]
    )
    sent = math.prod([digit.base for digit in not_in_target if digit not in used])
    # In a pair of bases 2 (replica) and 5 (shard), one value of the replica digit goes
    # with up to 3 values of the shard digit.
    sent *= math.prod([-(-shard.base // replica.base) for replica, shard in diagonals])
    dims = range(len(before.shape))
    for dim in dims:
        sent *= _most_along(exchange, dim, paired, used)
    nearest = not paired and all(_cuts_nest(exchange, dim) for dim in dims)
    return sent - max(least_kept, _kept(exchange) if nearest else 0)


def _most_along(
    exchange: Exchange, dim: int, paired: Collection[Digit], used: Collection[Digit]
) -> int:
    """Return the most elements that a rank sends along one dim, summed over all
    receivers that want different elements.

    On a replica axis that isn't `paired`, sender and receiver have the same coordinate.
    Of every other digit that cuts the target (`summed`) all values count; on an axis
    outside the group only the sender's overlaps do. But the `used` digits of shard axes
    follow from the digits that they are paired with.
    """
    cuts = exchange.cuts(exchange.after.orders[dim])
    same = [
        digit
        for digit in cuts
        if digit.axis not in exchange.shards and digit not in paired
    ]
    summed = [digit for digit in cuts if digit not in same and digit not in used]
    if len(summed) == len(cuts):
        # The parts of all receivers cover what a rank holds exactly once.
        return exchange.before.largest_shape[dim]
    length, levels = exchange.after.shape[dim], []
    for axis in exchange.after.orders[dim]:
        length = longest(length, [exchange.after.sizes[axis]])
        levels += [
            (length * digit.unit, digit in summed)
            for digit in cuts
            if digit.axis == axis
        ]
    return _most_within(exchange.before.largest_shape[dim], levels)


def _most_within(elements: int, levels: Sequence[tuple[int, bool]]) -> int:
    """Return how many of `elements` in a row can lie where some digits have one fixed
    value each.

    From R·S0 to S0·S0 on (2, 2), eight elements: rank (0, 0) holds four in a row. It
    sends those where axis 0 is at 0, which are four in a row; axis 1, which keeps its
    value for two elements, may have any.

    >>> _most_within(4, [(4, False), (2, True)])
    4

    Six of eight, where the first digit may have any value and the second one, over two
    elements, is fixed:

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
    """Return the least number of elements that a sending rank keeps: the product of the
    shorter lengths. Only for nearest senders, if `_cuts_nest` holds for all dims.

    It is 0 if the new cut has a digit of a shard axis where the old cut has another
    digit: from S0·S1 to S1·S0 on (2, 2), rank (0, 1) holds the first half of dim 0 and
    wants the second. A dim whose cut stays, even an uneven one, scales what is sent and
    what is kept alike.
    """
    before, after = exchange.before, exchange.after
    for old, new in zip(before.orders, after.orders):
        for held, wanted in zip(exchange.cuts(old), exchange.cuts(new)):
            if wanted.axis in exchange.shards and wanted != held:
                return 0
    return math.prod(
        [
            min(before.largest_shape[dim], after.largest_shape[dim])
            for dim in range(len(before.shape))
        ]
    )


def _cuts_nest(exchange: Exchange, dim: int) -> bool:
    """True if what ranks send along this dim can be counted exactly, see `most_sent`:
    the dim is cut as before. Or it is cut evenly, and the prime factors of the axis
    sizes (`Digit.base` in steps.py), from the outermost on, are those of the other cut
    as far as the shorter one goes."""
    before, after = exchange.before, exchange.after
    orders = before.orders[dim], after.orders[dim]
    if orders[0] == orders[1]:
        return True
    old, new = map(exchange.cuts, orders)
    if any(a.base != b.base for a, b in zip(old, new)):
        return False
    longer = max(old, new, key=len)  # its bases begin with those of the other
    return before.shape[dim] % math.prod([digit.base for digit in longer]) == 0


# --- Rounds ---
# An exchange over several axes may bring a rank many times what it holds. The pieces
# need a receive buffer until they are copied into their places; the step-by-step path,
# which changes one axis at a time, needs a smaller one. So a large exchange cuts each
# piece into about equal parts, and each round moves one part of every piece. The same
# elements go to the same ranks, and the buffers are no larger than the source.


def in_rounds(steps: tuple[Step, ...], itemsize: int, cost: Cost) -> tuple[Step, ...]:
    """Return these steps, with large all-to-alls and reduce-scatters over several axes
    in rounds, for smaller buffers, from twice ``cost.round_bytes`` of the tensor on."""
    if bytes_of(steps, itemsize) < 2 * cost.round_bytes:
        return steps
    return tuple(
        [
            _in_rounds(step, is_view, itemsize, cost)
            for step, is_view in with_views(steps)
        ]
    )


def with_views(steps: Sequence[Step]) -> Iterator[tuple[Step, bool]]:
    """Return each step, and whether its input is a view of a larger tensor."""
    return zip(steps, [False, *[isinstance(step, Narrow) for step in steps]])


def in_one_round(
    steps: tuple[Step, ...], *kinds: type[AllToAll | ReduceScatter]
) -> tuple[Step, ...]:
    """Return these steps, with those of the given kinds in one round."""
    return tuple(
        [
            dataclasses.replace(step, rounds=1) if isinstance(step, kinds) else step
            for step in steps
        ]
    )


def bytes_of(steps: Sequence[Step], itemsize: int) -> int:
    """Return the bytes of the global tensor; 0 if the steps don't communicate."""
    step = next((step for step in steps if isinstance(step, Collective)), None)
    return 0 if step is None else math.prod(step.before.shape) * itemsize


def _in_rounds(step: Step, is_view: bool, itemsize: int, cost: Cost) -> Step:
    """Split an all-to-all or reduce-scatter into as many rounds as keep its buffers
    small and each round worth its latency."""
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
    """Return the elements that a step packs and receives, and the rounds from which on
    its buffers are small enough: as large as what the rank holds; for a reduce-scatter,
    half of what one round would pack."""
    if len(step.axes) == 1:
        # The step-by-step path needs the same buffers for one axis.
        return 0, 1
    if isinstance(step, AllToAll):
        staged, room = arriving(step) + leaving(step), step.before.most
    elif (
        is_view or cut_last(step.before, step.after, step.axes) != 0
    ) and step.after.is_even:
        packed = step.ranks * step.chunk
        staged, room = packed + step.chunk, packed // 2
    else:
        # A cut of dim 0 packs nothing: its pieces lie in order. Uneven pieces are
        # padded and have no equal parts.
        return 0, 1
    return staged, -(-staged // max(room, 1))


def cut_into_rounds(length: Sequence[int], rounds: int) -> list[Box]:
    """Cut a piece with these lengths into as many boxes as rounds, along the first dim
    that is long enough, counted from its first element; some empty if none is.

    >>> [box.start for box in cut_into_rounds((2, 6), 3)]
    [(0, 0), (0, 2), (0, 4)]
    """
    dim = next((d for d, n in enumerate(length) if n >= rounds), None)
    # No dim is long enough: some boxes are empty, and their rounds move nothing.
    if dim is None:
        dim = max(range(len(length)), key=lambda d: length[d])
    boxes = []
    for number in range(rounds):
        start, end = (length[dim] * at // rounds for at in (number, number + 1))
        boxes.append(
            Box(
                (*[0] * dim, start, *[0] * (len(length) - dim - 1)),
                (*length[:dim], end - start, *length[dim + 1 :]),
            )
        )
    return boxes
