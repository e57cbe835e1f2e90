"""The search for a plan: moves, reductions, and what chooses between them. Read it from
`plan`, at the end.

From Partial("sum"), Shard(0) to Replicate(), Replicate() on a (2, 2) mesh:

>>> source = Regions.of((None, 0), ("sum", None), (8, 4), (2, 2))
>>> target = Regions.of((None, None), (None, None), (8, 4), (2, 2))
>>> print(line(source, target, plan(source, target, itemsize=4), itemsize=4))
P·S0 → R·R: all_reduce(a) 64 B, all_gather(b) 64 B

A plan is a tuple of steps, the same on every rank; `steps` says how to run each. The
first step starts in the boxes of `source`, each other one where the one before it
ended, and the last one ends in the boxes of `target`. Keep a plan, and for each step
the lists of one's own coordinate, for as long as the arguments are the same: all of
them are hashable, if `groups` is.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .cost import (
    EXCHANGE,
    Cost,
    Groups,
    arriving,
    arriving_by,
    collectives,
    in_rounds,
)
from .regions import (
    OPS,
    NotPlanned,
    Regions,
    common,
    lengths,
    longest,
    same_pieces,
)
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Divide,
    Embed,
    Exchange,
    Narrow,
    ReduceScatter,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    Names = Sequence[str] | None  # of the axes of a mesh


Steps = tuple[Step, ...]
# the first steps of a plan, and where they lead; a move does the rest
Beginning = tuple[Steps, Regions]


# --- Moves ---
# From boxes to other boxes, with no reduction. Ranks that hold the same piece are
# replicas of one another. A rank can get each piece that it wants from the replica that
# has its own coordinate on every axis along which the replicas differ. So a move needs
# a group over axes that cut the source, and no others.


def crossed(before: Regions, after: Regions) -> frozenset[int]:
    """The axes along which some rank and the nearest holder of a piece that it wants
    have different coordinates. Empty only if every rank has what it wants.

    With empty shards there may be more axes: those that only ranks who want nothing
    would have crossed.
    """
    if 0 in after.shape:
        return frozenset()
    axes: set[int] = set()
    for dim, (old, new) in enumerate(zip(before.orders, after.orders)):
        if old == new:
            continue
        depth = common(old, new)
        rest = old[depth:]
        # On the axes that cut the dim before, a piece has one holder. If an axis
        # doesn't cut the dim after, ranks at all its coordinates want the piece. If it
        # does, the ranks that want the piece may be where its holder is.
        axes.update([a for a in rest if a not in new])
        if any(a in new for a in rest):
            blocks = lengths(before.shape[dim], [before.sizes[a] for a in old[:depth]])
            axes.update(
                [
                    a
                    for a in rest
                    if a in new and _crosses(a, blocks, rest, new[depth:], before.sizes)
                ]
            )
    return frozenset(axes)


def _crosses(
    axis: int,
    blocks: Collection[int],
    old: tuple[int, ...],
    new: tuple[int, ...],
    sizes: tuple[int, ...],
) -> bool:
    """Whether an element of blocks so long, cut by these axes before and by those
    after, may be at other coordinates on `axis`. It isn't where the other axes make the
    same pieces for `axis` to cut, or none of more than one element, which is at 0
    then."""
    for block in blocks:
        one, other = (
            [sizes[a] for a in order[: order.index(axis)]] for order in (old, new)
        )
        if max(longest(block, one), longest(block, other)) > 1 and not same_pieces(
            block, one, other
        ):
            return True
    return False


def misplaced(before: Regions, after: Regions) -> frozenset[int]:
    """The axes whose cuts have to go: on each dim, all from the outermost cut on that
    `after` doesn't have at that depth."""
    return frozenset(
        [
            a
            for old, new in zip(before.orders, after.orders)
            for a in old[common(old, new) :]
        ]
    )


def cut_toward(before: Regions, toward: Regions, allowed: Collection[int]) -> Regions:
    """Cut `before` further by the allowed axes, as far as each cut is a cut of `toward`
    too. Needs no communication if these axes are free."""
    if not allowed:
        return before
    orders = []
    for old, new in zip(before.orders, toward.orders):
        depth = len(old)
        if depth < len(new) and new[:depth] == old:
            while depth < len(new) and new[depth] in allowed:
                depth += 1
            old = new[:depth]
        orders.append(old)
    return before.cut(orders)


def move(
    before: Regions,
    after: Regions,
    groups: Groups,
    itemsize: int,
    cost: Cost,
    limit: float = math.inf,
) -> tuple[Step, ...]:
    """The best plan from `before` to `after`, whose pending reductions are the same.
    With no more than `limit` collectives, unless the groups at hand ask for more."""
    axes = crossed(before, after)
    if not axes:
        return () if before == after else (Narrow(before, after),)
    plans = list(_in_one(before, after, axes, groups))
    if plans and groups.has(axes):
        return cost.fastest(plans, itemsize)
    one_by_one = _one_group_at_a_time(before, after, groups, itemsize, cost)
    if not plans:
        return one_by_one
    # More collectives that bring no more may be faster: a group over more axes than
    # need be has more latency.
    if (
        arriving_by(one_by_one) <= min(map(arriving_by, plans))
        and collectives(one_by_one) <= limit
    ):
        plans.append(one_by_one)
    return cost.fastest(plans, itemsize)


def _in_one(
    before: Regions, after: Regions, axes: frozenset[int], groups: Groups
) -> Iterator[tuple[Step, ...]]:
    """The plans with one collective."""
    # Narrowing is a view, and what is left is cut by the group alone.
    narrow = cut_toward(before, after, before.free)
    first = () if narrow == before else (Narrow(before, narrow),)
    group = tuple(sorted(axes))
    if groups.has(axes) and all(
        old[: len(new)] == new for old, new in zip(narrow.orders, after.orders)
    ):
        gather = AllGather(narrow, after, group)
        # Its cost would always be less than that of an all-to-all. But padding is sent,
        # too, and takes memory: one row that 64 ranks want is 64 rows in a gather.
        if arriving(gather) <= EXCHANGE * arriving(AllToAll(narrow, after, group)):
            yield (*first, gather)
            return
    for step in all_to_alls(Exchange(narrow, after, group), before.free, groups):
        yield (*first, step)


def all_to_alls(
    exchange: Exchange, free: frozenset[int], groups: Groups, op: str | None = None
) -> Iterator[AllToAll]:
    """The all-to-alls for an exchange, over groups with at least its axes, which the
    nearest senders need. A group with more axes is taken if it balances the senders, or
    if there is no other: where the nearest replicas would send much and others nothing,
    all of them can send (see `Diagonal`).

    Only axes are added that are replicated in the source and cut the target: an axis
    whose placement stays takes no part. `free` is that of the source before it was
    narrowed.
    """
    before, after, axes, reduced = exchange
    nearest = groups.has(axes)
    more = free & after.sharded
    if nearest and more:
        more = exchange.tied()
    if nearest and not more:
        yield AllToAll(before, after, axes, op, reduced)
        return
    for group in groups.between(axes, more.union(axes)):
        diagonals = exchange._replace(axes=group).diagonals()
        if diagonals or group == axes or not nearest:
            yield AllToAll(before, after, group, op, reduced, diagonals)


def _one_group_at_a_time(
    before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[Step, ...]:
    """One group at a time: from the inside out, give up the cuts that the target
    doesn't have, and make those that it has as soon as they fit.

    For example, S0·S1 to S1·S0 on (2, 2), without their joint group: an all-gather
    gives up the cut of dim 0 by axis 0, R·S1. The cut of dim 1 by axis 0 doesn't fit
    yet, since axis 1 cuts that dim and the target has axis 0 alone there. Then an
    all-to-all over axis 1 gives up that cut and makes both that the target has, S1·S0.
    """
    steps: list[Step] = []
    now = before
    while crossed(now, after):
        made, now = next_collective(now, after, groups, itemsize, cost)
        steps += made
    return (*steps, *(() if now == after else (Narrow(now, after),)))


def next_collective(
    now: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[tuple[Step, ...], Regions]:
    """One collective on the way to `after`, and where it leads."""
    then = _next_boxes(now, after, groups)
    axes = crossed(now, then)
    if not axes:
        return (Narrow(now, then),), then
    return cost.fastest(list(_in_one(now, then, axes, groups)), itemsize), then


def _next_boxes(now: Regions, after: Regions, groups: Groups) -> Regions:
    # By the group that gives up most cuts; of equals the one that leaves the smallest
    # boxes.
    wrong = misplaced(now, after)
    found = []
    for group in groups.within(wrong):
        popped = _without(now, after, group)
        then = cut_toward(popped, after, popped.free)
        if popped.sharded.isdisjoint(group) and (
            len(group) == 1 or groups.has(crossed(now, then))
        ):
            found.append(
                (
                    -len(group),
                    then.most,
                    -_unblocked(now, after, group),
                    groups.count(group),
                    group,
                    then,
                )
            )
    if found:
        return min(found)[-1]
    # Not reached: of a dim with misplaced cuts the innermost is one, and its axis has a
    # group.
    raise AssertionError(
        f"from {now} to {after} the cuts by {sorted(wrong)} have to go, and no group "
        "at hand gives any of them up"
    )


def _unblocked(now: Regions, after: Regions, group: tuple[int, ...]) -> int:
    """On how many dims the group's cuts are in the way of others that the target
    wants."""
    found = 0
    for old, new in zip(now.orders, after.orders):
        depth = common(old, new)
        found += depth < len(new) and not set(old[depth:]).isdisjoint(group)
    return found


def _without(now: Regions, after: Regions, group: tuple[int, ...]) -> Regions:
    """`now` without its innermost cuts, as long as they are the group's and not the
    target's."""
    orders = []
    for old, new in zip(now.orders, after.orders):
        depth, keep = len(old), common(old, new)
        while depth > keep and old[depth - 1] in group:
            depth -= 1
        orders.append(old[:depth])
    return now.cut(orders)


# --- Reductions ---
# Pending values become values, in other boxes if the target asks. At most two
# collectives if the groups are at hand.

# Orders in which several axes may cut a dim: do those that cut the target come last, do
# the pending ones come first?
_ORDERS = ((False, False), (False, True), (True, False), (True, True))


@dataclass(slots=True)
class Scatters:
    """Into which boxes a reduction over `axes` may cut its result on the way from
    `before` to `after`."""

    before: Regions
    after: Regions
    axes: frozenset[int]
    groups: Groups
    tried: set[int] = field(default_factory=set)  # the dims that some candidate cut

    def narrowed(self) -> tuple[Regions, ...]:
        """What to reduce: the part of the local tensor that the target wants; and the
        whole, so that axes which would cut the part are free to take part in the
        move."""
        narrow = cut_toward(self.before, self.after, self.before.free)
        return (narrow,) if narrow == self.before else (narrow, self.before)

    def cuts(self, narrow: Regions) -> Iterator[Regions]:
        """Different cuts of `narrow` along all the axes: where the target has them, the
        rest anywhere."""
        start = cut = narrow.without_pending(self.axes)
        found: list[Regions] = []
        for toward in dict.fromkeys(
            [
                cut_toward(start, self.after, allowed)
                for allowed in (self.axes, start.free)
            ]
        ):
            cut = self.spread(toward, sorted(self.axes - toward.sharded))
            if cut not in found:
                found.append(cut)
                yield cut
        if len(self.axes) > 1 and cut.most * self.groups.count(self.axes) > narrow.most:
            # Padded: all the axes, if there are several, where there is least padding.
            cut = self.spread(start, sorted(self.axes))
            if cut not in found:
                found.append(cut)
                yield cut
        if not any(self.groups.has(crossed(cut, self.after)) for cut in found):
            yield from self.movable(start, self.axes)

    def _dims(self) -> list[int]:
        """The dims that source or target cut, then the others: where a dim that source
        or target cut divides evenly, the lengths of the others make no difference."""
        ends = self.before.orders, self.after.orders
        return sorted(
            range(len(self.before.shape)),
            key=lambda dim: not any(orders[dim] for orders in ends),
        )

    def spread(self, regions: Regions, axes: list[int]) -> Regions:
        """Cut further, by all these axes on the dim where the biggest box gets
        smallest; of equals the first."""
        if not axes:
            return regions
        cuts, parts = [], self.groups.count(axes)
        for dim in self._dims():
            cuts.append(self._cut_on(regions, dim, axes))
            if regions.longest[dim] % parts == 0:
                return cuts[-1]  # evenly, so no box is smaller
        return min(cuts, key=lambda cut: cut.most)

    def movable(self, start: Regions, axes: frozenset[int]) -> Iterator[Regions]:
        """Different cuts of `start` along all these axes from which one collective
        leads on, with the groups at hand. Whose axes talk in it depends on the dim that
        they cut, and on their order there."""
        found: list[Regions] = []
        for (last, first), dim in itertools.product(_ORDERS, self._dims()):
            order = sorted(
                axes,
                key=lambda a: (
                    last and a in self.after.sharded,
                    first and a not in self.axes,
                    a,
                ),
            )
            cut = self._cut_on(start, dim, order)
            if cut not in found and self.groups.has(crossed(cut, self.after)):
                found.append(cut)
                yield cut

    def _cut_on(self, regions: Regions, dim: int, axes: list[int]) -> Regions:
        self.tried.add(dim)
        orders = regions.orders
        return regions.cut(
            (*orders[:dim], orders[dim] + tuple(axes), *orders[dim + 1 :])
        )


@dataclass(slots=True)
class Reduction:
    """The problem: reduce with `op` over `axes`, which are pending before and not
    after, and end in other boxes.

    Some methods are ways to do it; each gives beginnings of plans, all of them right.
    `best` chooses one of the plans.
    """

    before: Regions
    after: Regions
    axes: frozenset[int]
    op: str
    groups: Groups
    itemsize: int
    cost: Cost
    scatters: Scatters = field(init=False)
    crossed: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.scatters = Scatters(self.before, self.after, self.axes, self.groups)
        self.crossed = crossed(self.before, self.after)

    def best(self) -> Steps:
        """Of the plans that bring the fewest elements, the fastest. No other plan is
        made where the first can't be beaten: all-reduces and nothing moves, or one
        reduce-scatter, without padding, that leaves each rank what the target wants."""
        if self.axes.isdisjoint(self.after.sharded) and not self.crossed:
            return next(self._plans())
        if self.axes.issubset(self.after.sharded):
            head, now = next(self.scattered())
            if (
                len(head) == 1
                and now == self.after
                and isinstance(head[0], ReduceScatter)
                and self._exact(head[0])
            ):
                return head
        plans = [(plan, arriving_by(plan)) for plan in self._plans()]
        most = min([elements for _, elements in plans])
        return self.cost.fastest(
            [plan for plan, elements in plans if elements <= most], self.itemsize
        )

    def _plans(self) -> Iterator[Steps]:
        """Each way to begin, with the move that leads on from there."""
        most = self._most_collectives()
        for way in self._ways():
            for head, now in way():
                left = most - collectives(head)
                tail = move(
                    now, self.after, self.groups, self.itemsize, self.cost, left
                )
                if collectives(tail) <= left:
                    yield (*head, *tail)

    def _ways(self) -> tuple[Callable[[], Iterator[Beginning]], ...]:
        """Of plans that cost the same, that of the first way is taken."""
        return (
            self.whole,
            self.part_whole,
            self.scattered,
            self.moved_first,
            partial(reduce_by_one_exchange, self),
            partial(reduce_group_by_group, self),
            partial(reduce_parts_by_exchange, self),
        )

    def _most_collectives(self) -> int:
        """As many as it takes one axis at a time, and no more than two where one group
        has all that talk."""
        one_by_one = len(self.axes | misplaced(self.before, self.after))
        return (
            min(one_by_one, 2)
            if self.groups.has(self.axes | self.crossed)
            else one_by_one
        )

    def _exact(self, step: ReduceScatter) -> bool:
        return (
            step.before == self.before and step.ranks * step.chunk == self.before.most
        )

    def whole(self) -> Iterator[Beginning]:
        """All-reduce what every rank has, then move."""
        for narrow in self.scatters.narrowed():
            yield (
                self.all_reduce(self.before, narrow, self.axes),
                narrow.without_pending(self.axes),
            )

    def scattered(self) -> Iterator[Beginning]:
        """Reduce-scatter, each rank keeping one part along all the axes, then move or
        gather the parts."""
        for narrow in self.scatters.narrowed():
            first = () if narrow == self.before else (Narrow(self.before, narrow),)
            for cut in self.scatters.cuts(narrow):
                yield (*first, *self._reduce_scatter(narrow, cut, self.axes)), cut

    def part_whole(self) -> Iterator[Beginning]:
        """Reduce-scatter over the axes that cut the target, then all-reduce over the
        rest what is left of the data."""
        first = self.axes & self.after.sharded
        rest = self.axes - first
        if not (first and rest):
            return
        start = self.before.without_pending(first)
        cut = cut_toward(start, self.after, start.free)
        if not cut.sharded.issuperset(first):
            return
        # Else the move after it would be a third collective.
        if not self.groups.has(self.axes) or not crossed(cut, self.after):
            scattered = self._reduce_scatter(self.before, cut, first)
            yield (
                (*scattered, *self.all_reduce(cut, cut, rest)),
                cut.without_pending(rest),
            )

    def moved_first(self) -> Iterator[Beginning]:
        """Move into boxes from which the target is a cut, then reduce there."""
        inner = self.before.cut(
            [_until(order, self.axes) for order in self.after.orders]
        )
        if not crossed(self.before, inner):
            return
        moved = move(
            self.before,
            inner,
            self.groups,
            self.itemsize,
            self.cost,
            self._most_collectives() - 1,
        )
        if self.axes.issubset(self.after.sharded):
            yield (
                (*moved, *self._reduce_scatter(inner, self.after, self.axes)),
                self.after,
            )
        else:
            yield (
                (*moved, *self.all_reduce(inner, inner, self.axes)),
                inner.without_pending(self.axes),
            )

    def all_reduce(
        self, before: Regions, narrow: Regions, axes: frozenset[int]
    ) -> Steps:
        """Of the part in `narrow`, by as few groups as there are over these axes."""
        steps: list[Step] = [] if narrow == before else [Narrow(before, narrow)]
        for group in self.groups.cover(axes):
            then = narrow.without_pending(group)
            steps.append(AllReduce(narrow, then, group, self.op))
            narrow = then
        return tuple(steps)

    def _reduce_scatter(
        self, before: Regions, cut: Regions, axes: frozenset[int]
    ) -> Steps:
        """To `cut`, which cuts `before` further by `axes` and maybe by free axes.
        Without the joint group it takes one group at a time, outer cuts first."""
        if self.groups.has(axes):
            return (ReduceScatter(before, cut, tuple(sorted(axes)), self.op),)
        steps: list[Step] = []
        while left := axes & before.pending:
            group, then = self._next_cut(before, cut, left)
            steps.append(ReduceScatter(before, then, group, self.op))
            before = then
        return tuple(steps) if before == cut else (*steps, Narrow(before, cut))

    def _next_cut(
        self, now: Regions, cut: Regions, left: frozenset[int]
    ) -> tuple[tuple[int, ...], Regions]:
        for group in self.groups.within(left):
            then = cut_toward(now.without_pending(group), cut, now.free.union(group))
            if then.sharded.issuperset(group):
                return group, then
        raise AssertionError(
            f"none of the axes {sorted(left)} makes the next cut from {now} to {cut}"
        )


def _until(order: tuple[int, ...], stops: frozenset[int]) -> tuple[int, ...]:
    """The order as far as it has none of these axes."""
    depth = next((i for i, axis in enumerate(order) if axis in stops), len(order))
    return order[:depth]


def reduce_by_one_exchange(asked: Reduction) -> Iterator[Beginning]:
    """One all-to-all that brings every rank all terms of what it wants; it adds them up
    itself. That is best where each rank wants little.

    For example, a (16, 16) tensor of 4-byte elements goes from R·S0·P to R·S1·S1 on (2,
    2, 2). That is all_to_all(b,c) sum 384 B; without this function it would be
    reduce_scatter(c) 256 B, all_to_all(b,c) 192 B.
    """
    if asked.groups.has(asked.axes | asked.crossed):
        yield from _exchanges(asked, asked.after)


def _exchanges(asked: Reduction, then: Regions) -> Iterator[Beginning]:
    """All-to-alls to these boxes that bring each rank all terms. Those of an average
    are divided before they are sent: their sum may be more than a short floating-point
    number can be."""
    group, reduced = (
        tuple(sorted(axes))
        for axes in (asked.axes | crossed(asked.before, then), asked.axes)
    )
    op, mean = (
        (asked.op, ())
        if asked.op != "avg"
        else ("sum", (Divide(asked.groups.count(reduced)),))
    )
    for step in all_to_alls(
        Exchange(asked.before, then, group, reduced),
        asked.before.free,
        asked.groups,
        op,
    ):
        yield (*mean, step), then


def reduce_group_by_group(asked: Reduction) -> Iterator[Beginning]:
    """Reduce-scatter as soon as the cut fits. Where none fits, all-reduce at once, or
    move on until one does; what doesn't cut the target is all-reduced in the end.

    For example, a (64, 64) tensor of 4-byte elements goes from P·P·S0 to S0·R·S1 on (2,
    2, 2). Without joint groups that is all_to_all(c), reduce_scatter(a), all_reduce(b),
    4096 B each.
    """
    if asked.groups.has(asked.axes | asked.crossed):
        return  # the other ways take no more than two
    for early in (True, False):
        steps: list[Step] = []
        now = asked.before
        while asked.axes & now.pending:
            made, now = _reduce_or_move(asked, now, early)
            steps += made
        yield tuple(steps), now


def _reduce_or_move(asked: Reduction, now: Regions, early: bool) -> Beginning:
    narrow = cut_toward(now, asked.after, now.free)
    first = () if narrow == now else (Narrow(now, narrow),)
    left = asked.axes & now.pending
    for group in asked.groups.within(left):
        then = cut_toward(
            narrow.without_pending(group), asked.after, narrow.free.union(group)
        )
        if then.sharded.issuperset(group):
            return (*first, ReduceScatter(narrow, then, group, asked.op)), then
    if early or left.isdisjoint(asked.after.sharded):
        return (
            *first,
            *asked.all_reduce(narrow, narrow, left),
        ), narrow.without_pending(left)
    made, then = next_collective(
        narrow, asked.after, asked.groups, asked.itemsize, asked.cost
    )
    return (*first, *made), then


def reduce_parts_by_exchange(asked: Reduction) -> Iterator[Beginning]:
    """Where only a group over all axes that talk is at hand: by that group, each rank
    gets all terms of a part that no other rank has, and adds them up itself; then the
    parts move.

    In the example of `reduce_group_by_group`, with all joint groups:
    reduce_scatter(a,b) 6144 B, all_to_all(a,b,c) 4096 B. With the group over a, b and c
    alone: all_to_all(a,b,c) sum 8192 B, all_gather(b) 2048 B; `reduce_by_one_exchange`
    would bring 16384 B.
    """
    group = asked.axes | asked.crossed
    if asked.groups.has(asked.axes) or not asked.groups.has(group):
        return
    orders = zip(asked.before.orders, asked.after.orders)
    start = asked.before.cut(
        [old[: common(old, new)] for old, new in orders]
    ).without_pending(asked.axes)
    like = cut_toward(start, asked.after, start.free)
    first = asked.scatters.spread(like, sorted(group - like.sharded))
    for cut in dict.fromkeys((first, *asked.scatters.movable(start, group))):
        if asked.groups.has(asked.axes | crossed(asked.before, cut)):
            yield from _exchanges(asked, cut)


# --- Plans ---

NAMES: Mapping[type[Step], str] = {
    Narrow: "narrow",
    Embed: "embed",
    Divide: "divide",
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
}


def plan(
    source: Regions,
    target: Regions,
    itemsize: int,
    groups: Iterable[Iterable[int]] | None = None,
    cost: Cost = Cost(),
) -> tuple[Step, ...]:
    """The steps from `source` to `target`, for elements of `itemsize` bytes: of the
    plans that are tried, the fastest by `cost`. Where a reduction ends, it is the
    fastest of those that bring the fewest bytes.

    Where every joint group exists, that is at most one collective if no reduction ends,
    else at most two; where `cost` knows the speed of axes, a move may be more of them.

    Args:
        groups: tuples of axes for which a joint group exists; single axes always have
            one. None: all exist.

    Raises:
        ValueError: source and target are of different tensors or meshes.
        NotPlanned: the target asks for a pending reduction that can't be made from what
            the source has.
    """
    return in_rounds(
        plan_at_once(source, target, itemsize, groups, cost), itemsize, cost
    )


def plan_at_once(
    source: Regions,
    target: Regions,
    itemsize: int,
    groups: Iterable[Iterable[int]] | None,
    cost: Cost,
    tried: set[int] | None = None,
) -> tuple[Step, ...]:
    """`plan`, with no step in rounds.

    Args:
        tried: gets the dims that some candidate was made to cut by `Scatters`, those of
            source and target among them; none where new terms are made.
    """
    if (source.shape, source.sizes) != (target.shape, target.sizes):
        raise ValueError(
            f"no way from {source.shape} on {source.sizes} to {target.shape} on "
            f"{target.sizes}"
        )
    have = Groups.of(groups, source.sizes)
    return _with_reductions(source, target, have, itemsize, cost, tried)


def _with_reductions(
    source: Regions,
    target: Regions,
    have: Groups,
    itemsize: int,
    cost: Cost,
    tried: set[int] | None,
) -> tuple[Step, ...]:
    made = _made_pending(source, target)
    if not made:
        return _reduce_and_move(source, target, have, itemsize, cost, tried)
    last = _embed_last(source, target, made, have, itemsize, cost)
    first = (
        _embed_first(source, target, made, have, itemsize, cost)
        if made & source.sharded
        else last
    )
    # At most one collective for each reduction that ends, and one for each cut that has
    # to go and becomes no term. `first` has no more: each of its collectives ends one
    # of these reductions or gives up one of these cuts, and none of them comes back. So
    # one of both stays.
    most = min(
        collectives(last),
        len((source.pending - target.pending) | (misplaced(source, target) - made)),
    )
    steps = cost.fastest(
        [found for found in (last, first) if collectives(found) <= most], itemsize
    )
    parts = math.prod(
        source.sizes[a] for a in made - source.sharded if target.partial[a] == "sum"
    )
    return steps if parts == 1 else (*steps, Divide(parts))


def _embed_last(
    source: Regions,
    target: Regions,
    made: frozenset[int],
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> tuple[Step, ...]:
    """To the target's boxes, still cut by the axes whose shards become terms of a sum;
    then the zeros around them.

    For example, S0·S0 to S0·P on (2, 2): nothing moves, and the zeros are where axis 1
    cut.
    """
    kept = tuple(None if axis in made else op for axis, op in enumerate(target.partial))
    orders = [
        new + tuple(a for a in old if a in made)
        for old, new in zip(source.orders, target.orders)
    ]
    middle = Regions(target.shape, target.sizes, tuple(orders), kept)
    steps = _reduce_and_move(source, middle, groups, itemsize, cost)
    return steps if middle.orders == target.orders else (*steps, Embed(middle, target))


def _embed_first(
    source: Regions,
    target: Regions,
    made: frozenset[int],
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> tuple[Step, ...]:
    """The zeros around each shard as soon as no other axis cuts inside of it, then to
    the target's boxes.

    For example, R·S0 to S0·P on (2, 2): each rank puts zeros around its shard, R·P, and
    narrows that. From S0·S0 to P·S0, axis 1 cuts inside of axis 0: an all-gather over
    axis 1, zeros around what axis 0 cut, then a narrow.
    """
    steps: list[Step] = []
    now = _with_terms(source, target, made)
    while True:
        outer = _with_terms(
            now.cut([_without_last(order, made) for order in now.orders]), target, made
        )
        if outer != now:
            steps.append(Embed(now, outer))
            now = outer
        if made.isdisjoint(now.sharded):
            return (*steps, *_reduce_and_move(now, target, groups, itemsize, cost))
        bare = now.cut([_until_last(order, made) for order in now.orders])
        steps += move(now, bare, groups, itemsize, cost)
        now = bare


def _with_terms(now: Regions, target: Regions, made: frozenset[int]) -> Regions:
    """Pending as in the target over those of `made` that cut nothing any more."""
    terms = made - now.sharded
    partial = tuple(
        [
            new if axis in terms else old
            for axis, (old, new) in enumerate(zip(now.partial, target.partial))
        ]
    )
    return Regions(now.shape, now.sizes, now.orders, partial)


def _without_last(order: tuple[int, ...], made: frozenset[int]) -> tuple[int, ...]:
    while order and order[-1] in made:
        order = order[:-1]
    return order


def _until_last(order: tuple[int, ...], made: frozenset[int]) -> tuple[int, ...]:
    """Without what is inside of the last cut by `made`; all of it if there is none."""
    last = max(
        [depth for depth, axis in enumerate(order) if axis in made],
        default=len(order) - 1,
    )
    return order[: last + 1]


def _reduce_and_move(
    source: Regions,
    target: Regions,
    groups: Groups,
    itemsize: int,
    cost: Cost,
    tried: set[int] | None = None,
) -> tuple[Step, ...]:
    ended = source.pending - target.pending
    if not ended:
        return move(source, target, groups, itemsize, cost)
    if 0 in source.shape and source.orders != target.orders:
        # nothing to reduce; else it's all-reduces, as for all other sizes
        return (Narrow(source, target),)
    ops = {op for axis, op in enumerate(source.partial) if op and axis in ended}
    # Sums and averages mix: all terms are divided by the number of ranks that are
    # averaged, and then summed. They are divided before the sum, as NCCL does it: the
    # sum of many may be more than a short floating-point number can be.
    op, terms = ops.pop(), 1
    if ops:
        op, terms = (
            "sum",
            math.prod(source.sizes[a] for a in ended if source.partial[a] == "avg"),
        )
    asked = Reduction(source, target, ended, op, groups, itemsize, cost)
    steps = asked.best()
    if tried is not None:
        tried.update(asked.scatters.tried)
    return steps if terms == 1 else (Divide(terms), *steps)


def _made_pending(source: Regions, target: Regions) -> frozenset[int]:
    """The axes on which the target is pending and the source isn't."""
    for axis, (old, new) in enumerate(zip(source.partial, target.partial)):
        if new is None or new == old:
            continue
        if old is not None:
            raise NotPlanned(
                f"axis {axis}: a pending {old} can't become a pending {new}"
            )
        if axis in source.sharded and new != "sum":
            raise NotPlanned(f"axis {axis}: a shard can't become a term of {new}")
        if new != "sum" and not OPS[new].keeps_value:
            raise NotPlanned(f"axis {axis}: a value can't be split into terms of {new}")
    return target.pending - source.pending


# --- Plans as text ---


def line(
    source: Regions,
    target: Regions,
    steps: Sequence[Step],
    itemsize: int,
    names: Sequence[str] | None = None,
) -> str:
    """A plan as one line: the specs, and each step with its axes and the bytes that it
    brings to a rank at most.

    Axes are called by `names`, or a, b, c as they come.
    """
    words = ", ".join(_words(step, itemsize, names) for step in steps)
    return f"{source} → {target}: {words or 'nothing to do'}"


def _words(step: Step, itemsize: int, names: Sequence[str] | None) -> str:
    name = NAMES[type(step)]
    if isinstance(step, Divide):
        return f"{name} by {step.by}"
    if not isinstance(step, Collective):
        return name
    axes = ",".join(names[a] if names else chr(ord("a") + a) for a in step.axes)
    op = getattr(step, "op", None)
    label = "" if op in (None, "sum") and not getattr(step, "reduced", ()) else f" {op}"
    rounds = getattr(step, "rounds", 1)
    several = f" in {rounds} rounds" if rounds > 1 else ""
    return f"{name}({axes}){label} {arriving(step) * itemsize} B{several}"


def flatten_call(axes: Sequence[int], names: Names) -> str:  # overlay only
    """The call on a mesh, whose axes have these names, that makes a group over several
    of them.

    >>> flatten_call((0, 1), ("dp", "cp", "tp"))
    'mesh["dp", "cp"].flatten("dp_cp")'
    """
    if not names:
        return f"a group over axes {tuple(axes)} of a mesh without names"
    chosen = [str(names[axis]) for axis in axes]
    listed = ", ".join(f'"{name}"' for name in chosen)
    return f'mesh[{listed}].flatten("{"_".join(chosen)}")'
