"""The search for a plan: how boxes move, how reductions end, and the choice between
plans. Start reading at `plan`, near the end.

From Partial("sum"), Shard(0) to Replicate(), Replicate() on a (2, 2) mesh:

>>> source = Regions.of((None, 0), ("sum", None), (8, 4), (2, 2))
>>> target = Regions.of((None, None), (None, None), (8, 4), (2, 2))
>>> print(line(source, target, plan(source, target, itemsize=4), itemsize=4))
P·S0 → R·R: all_reduce(a) 64 B, all_gather(b) 64 B

A plan is a tuple of steps, the same on every rank; `steps.py` says how to run each. The
first step starts in the boxes of `source`, each other step in those where the step
before it ended, and the last step ends in the boxes of `target`. All arguments of
`plan` are hashable if `groups` is, so plans can be cached by them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .boxes import lengths, longest, same_pieces
from .cost import (
    EXCHANGE,
    Cost,
    Groups,
    arriving,
    arriving_by,
    collectives,
    in_rounds,
)
from .regions import OPS, NotPlanned, Regions, common_prefix
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
# The first steps of a plan, and the regions after them. A move does the rest.
Beginning = tuple[Steps, Regions]
# A plan, and the dims that the search tried to cut where a reduction ends.
Searched = tuple[Steps, frozenset[int]]


# --- Moves ---
# From boxes to other boxes, without a reduction. Ranks that hold the same piece are
# replicas of one another. A rank can fetch each piece that it wants from the replica
# that shares its coordinate on every axis along which the replicas differ. So a move
# needs a group over axes that cut the source, and over no others.


def crossed(before: Regions, after: Regions) -> frozenset[int]:
    """Return the axes along which some rank has another coordinate than the nearest
    holder of a piece that it wants. Empty only if every rank holds what it wants;
    perhaps more where shards are empty."""
    if 0 in after.shape:
        return frozenset()
    axes: set[int] = set()
    for dim, (old, new) in enumerate(zip(before.orders, after.orders)):
        if old == new:
            continue
        depth = common_prefix(old, new)
        inner = old[depth:]
        # On the axes that cut the dim before, a piece has one coordinate. If an axis
        # doesn't cut the dim after, ranks at all its coordinates want the piece. If it
        # does, the ranks that want the piece may have the coordinate of its holder.
        axes.update([a for a in inner if a not in new])
        if any(a in new for a in inner):
            blocks = lengths(before.shape[dim], [before.sizes[a] for a in old[:depth]])
            axes.update(
                [
                    a
                    for a in inner
                    if a in new
                    and _crosses(a, blocks, inner, new[depth:], before.sizes)
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
    """True if some element of a block may have another coordinate on `axis` after. It
    has the same if the other axes make the same pieces for `axis` to cut, or pieces of
    at most one element, which is always at coordinate 0."""
    for block in blocks:
        old_sizes, new_sizes = (
            [sizes[a] for a in order[: order.index(axis)]] for order in (old, new)
        )
        if max(
            longest(block, old_sizes), longest(block, new_sizes)
        ) > 1 and not same_pieces(block, old_sizes, new_sizes):
            return True
    return False


def misplaced(before: Regions, after: Regions) -> frozenset[int]:
    """Return the axes whose cuts must be undone: on each dim, all from the outermost on
    that `after` doesn't have at that depth."""
    return frozenset(
        [
            a
            for old, new in zip(before.orders, after.orders)
            for a in old[common_prefix(old, new) :]
        ]
    )


def cut_toward(before: Regions, toward: Regions, allowed: Collection[int]) -> Regions:
    """Return `before` cut further by allowed axes as far as `toward` is. If they are
    free, that needs no communication."""
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
    """Return the best plan between regions with the same pending reductions."""
    axes = crossed(before, after)
    if not axes:
        return () if before == after else (Narrow(before, after),)
    plans = list(_in_one(before, after, axes, groups))
    if plans and groups.has(axes):
        return cost.fastest(plans, itemsize)
    one_by_one = _one_group_at_a_time(before, after, groups, itemsize, cost)
    if not plans:
        return one_by_one
    # Several collectives that bring no more elements may be faster than one: the group
    # of that one has more axes than necessary, and so more latency.
    if (
        arriving_by(one_by_one) <= min(map(arriving_by, plans))
        and collectives(one_by_one) <= limit
    ):
        plans.append(one_by_one)
    return cost.fastest(plans, itemsize)


def _in_one(
    before: Regions, after: Regions, axes: frozenset[int], groups: Groups
) -> Iterator[tuple[Step, ...]]:
    """Yield the plans with one collective that the groups allow, some after a
    narrow."""
    # Narrow first, which is a view: then only the axes of the group cut what is left.
    narrow = cut_toward(before, after, before.free)
    first = () if narrow == before else (Narrow(before, narrow),)
    group = tuple(sorted(axes))
    if groups.has(axes) and all(
        old[: len(new)] == new for old, new in zip(narrow.orders, after.orders)
    ):
        gather = AllGather(narrow, after, group)
        # The cost model always prefers a gather to an all-to-all. But a gather sends
        # padding, too, which takes memory: one row for 64 ranks is 64 rows in a gather.
        if arriving(gather) <= EXCHANGE * arriving(AllToAll(narrow, after, group)):
            yield (*first, gather)
            return
    for step in all_to_alls(Exchange(narrow, after, group), before.free, groups):
        yield (*first, step)


def all_to_alls(
    exchange: Exchange, free: frozenset[int], groups: Groups, op: str | None = None
) -> Iterator[AllToAll]:
    """Yield the all-to-alls for an exchange, over groups that have at least its axes.

    A group with more axes is tried if it balances the senders, or if there is no other.
    Where the nearest replicas would send much and the others nothing, all of them can
    send, see `Diagonal`. Only axes that are replicated in the source and cut the target
    are added: an axis whose placement stays takes no part.
    """
    before, after, axes, reduced = exchange
    has_exact_group = groups.has(axes)
    extra = free & after.sharded
    if has_exact_group and extra:
        extra = exchange.tied()
    if has_exact_group and not extra:
        yield AllToAll(before, after, axes, op, reduced)
        return
    for group in groups.between(axes, extra.union(axes)):
        diagonals = exchange._replace(axes=group).diagonals()
        if diagonals or group == axes or not has_exact_group:
            yield AllToAll(before, after, group, op, reduced, diagonals)


def _one_group_at_a_time(
    before: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[Step, ...]:
    """Plan one collective after the other, each over one group. From the inside out,
    undo the cuts that the target doesn't have, and make the target's cuts as soon as
    they fit.

    For example, S0·S1 to S1·S0 on (2, 2) without the joint group. An all-gather undoes
    the cut of dim 0 by axis 0, which gives R·S1. The cut of dim 1 by axis 0 doesn't fit
    yet, since axis 1 cuts that dim and the target has axis 0 alone there. Then an
    all-to-all over axis 1 undoes that cut and makes both cuts of the target, S1·S0.
    """
    steps: list[Step] = []
    now = before
    while crossed(now, after):
        added, now = next_collective(now, after, groups, itemsize, cost)
        steps += added
    return (*steps, *(() if now == after else (Narrow(now, after),)))


def next_collective(
    now: Regions, after: Regions, groups: Groups, itemsize: int, cost: Cost
) -> tuple[tuple[Step, ...], Regions]:
    """Return one collective on the way to `after`, perhaps after a narrow (only a
    narrow if that crosses no axis), and the regions then. `crossed(now, after)` must
    not be empty."""
    then = _next_boxes(now, after, groups)
    axes = crossed(now, then)
    if not axes:
        return (Narrow(now, then),), then
    return cost.fastest(list(_in_one(now, then, axes, groups)), itemsize), then


def _next_boxes(now: Regions, after: Regions, groups: Groups) -> Regions:
    """Choose the boxes after the next collective of `_one_group_at_a_time`. It undoes
    cuts that `after` doesn't have, by the axes of one group, and makes cuts of `after`
    where they then fit.

    The group with most axes is chosen. Ties go to the smallest boxes, then to the group
    whose cuts block cuts of `after` on most dims, then to that with fewest ranks.
    """
    wrong = misplaced(now, after)
    candidates = []
    for group in groups.within(wrong):
        undone = _without(now, after, group)
        then = cut_toward(undone, after, undone.free)
        if undone.sharded.isdisjoint(group) and (
            len(group) == 1 or groups.has(crossed(now, then))
        ):
            candidates.append(
                (
                    -len(group),
                    then.most,
                    -_unblocked(now, after, group),
                    groups.count(group),
                    group,
                    then,
                )
            )
    if candidates:
        return min(candidates)[-1]
    # Not reached. On a dim with misplaced cuts the innermost cut is misplaced, and its
    # axis alone always has a group.
    raise AssertionError(
        f"from {now} to {after} the cuts by {sorted(wrong)} have to go, and no group "
        "at hand gives any of them up"
    )


def _unblocked(now: Regions, after: Regions, group: tuple[int, ...]) -> int:
    """Return on how many dims the group's cuts stand in the way of the target's."""
    dims = 0
    for old, new in zip(now.orders, after.orders):
        depth = common_prefix(old, new)
        dims += depth < len(new) and not set(old[depth:]).isdisjoint(group)
    return dims


def _without(now: Regions, after: Regions, group: tuple[int, ...]) -> Regions:
    """Return `now` without its innermost cuts by axes of the group, as far as other
    axes and the outer cuts that `now` and `after` have in common allow."""
    orders = []
    for old, new in zip(now.orders, after.orders):
        depth, keep = len(old), common_prefix(old, new)
        while depth > keep and old[depth - 1] in group:
            depth -= 1
        orders.append(old[:depth])
    return now.cut(orders)


# --- Reductions ---
# A pending reduction ends, and its result lands in the boxes of the target. That takes
# two collectives at most if the groups are at hand.

# Orders in which several axes may cut a dim: (the axes that cut the target come last,
# the pending axes come first).
_ORDERS = ((False, False), (False, True), (True, False), (True, True))


@dataclass(slots=True)
class Scatters:
    """The boxes into which a reduction over `axes` may cut its result, on the way from
    `before` to `after`.

    Attributes:
        before, after: the regions of the source and of the target.
        axes: the axes over which the reduction ends.
        groups: the groups at hand.
        tried: the dims that some candidate cut.
    """

    before: Regions
    after: Regions
    axes: frozenset[int]
    groups: Groups
    tried: set[int] = field(default_factory=set)

    def narrowed(self) -> tuple[Regions, ...]:
        """What to reduce: the part that the target wants, and the whole if that is
        more, where axes that would cut the part are free to take part in the move."""
        narrow = cut_toward(self.before, self.after, self.before.free)
        return (narrow,) if narrow == self.before else (narrow, self.before)

    def cuts(self, narrow: Regions) -> Iterator[Regions]:
        """Yield cuts of `narrow` along all the axes: as the target has them, the others
        anywhere. Notes in `tried` which dims it cut."""
        start = cut = narrow.without_pending(self.axes)
        candidates: list[Regions] = []
        for toward in dict.fromkeys(
            [
                cut_toward(start, self.after, allowed)
                for allowed in (self.axes, start.free)
            ]
        ):
            cut = self.spread(toward, sorted(self.axes - toward.sharded))
            if cut not in candidates:
                candidates.append(cut)
                yield cut
        if len(self.axes) > 1 and cut.most * self.groups.count(self.axes) > narrow.most:
            # This cut needs padding. Try all axes on the dim with the least padding.
            cut = self.spread(start, sorted(self.axes))
            if cut not in candidates:
                candidates.append(cut)
                yield cut
        if not any(self.groups.has(crossed(cut, self.after)) for cut in candidates):
            yield from self.movable(start, self.axes)

    def _dims(self) -> list[int]:
        """Return the dims that source or target cut, then the others, whose lengths
        make no difference to the plan if one of the former divides evenly."""
        ends = self.before.orders, self.after.orders
        return sorted(
            range(len(self.before.shape)),
            key=lambda dim: not any(orders[dim] for orders in ends),
        )

    def spread(self, regions: Regions, axes: list[int]) -> Regions:
        """Cut by all these axes, on the first dim where the largest box becomes
        smallest."""
        if not axes:
            return regions
        cuts, parts = [], self.groups.count(axes)
        for dim in self._dims():
            cuts.append(self._cut_on(regions, dim, axes))
            if regions.largest_shape[dim] % parts == 0:
                # An even cut: no other dim gives a smaller box.
                return cuts[-1]
        return min(cuts, key=lambda cut: cut.most)

    def movable(self, start: Regions, axes: frozenset[int]) -> Iterator[Regions]:
        """Yield cuts of `start` along all these axes from which one collective leads to
        the target: which axes talk in it depends on the dim that they cut, and on their
        order there. Notes in `tried` which dims it cut."""
        candidates: list[Regions] = []
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
            if cut not in candidates and self.groups.has(crossed(cut, self.after)):
                candidates.append(cut)
                yield cut

    def _cut_on(self, regions: Regions, dim: int, axes: list[int]) -> Regions:
        """Cut a dim further by these axes, and note that it was tried."""
        self.tried.add(dim)
        orders = regions.orders
        return regions.cut(
            (*orders[:dim], orders[dim] + tuple(axes), *orders[dim + 1 :])
        )


@dataclass(slots=True)
class Reduction:
    """The task to end a reduction `op` over `axes`, which are pending before and not
    after, in other boxes.

    The methods that yield a `Beginning` are ways to do it; all are correct, and `best`
    chooses among the plans.
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
        """Return the fastest of the plans that bring the fewest elements. Two cases
        can't be beaten, and end the search early: all-reduces after which nothing
        moves; and one reduce-scatter without padding that leaves each rank what the
        target wants."""
        if self.axes.isdisjoint(self.after.sharded) and not self.crossed:
            return next(self._plans())
        if self.axes.issubset(self.after.sharded):
            head, now = next(self.scatter_then_move())
            if (
                len(head) == 1
                and now == self.after
                and isinstance(head[0], ReduceScatter)
                and self._exact(head[0])
            ):
                return head
        plans = [(plan, arriving_by(plan)) for plan in self._plans()]
        fewest = min([elements for _, elements in plans])
        return self.cost.fastest(
            [plan for plan, elements in plans if elements <= fewest], self.itemsize
        )

    def _plans(self) -> Iterator[Steps]:
        """Yield the plans of `_most_collectives` at most: each beginning of each way,
        and the move that follows it."""
        most = self._most_collectives()
        for way in self._ways():
            for head, now in way():
                remaining = most - collectives(head)
                tail = move(
                    now, self.after, self.groups, self.itemsize, self.cost, remaining
                )
                if collectives(tail) <= remaining:
                    yield (*head, *tail)

    def _ways(self) -> tuple[Callable[[], Iterator[Beginning]], ...]:
        """The ways to begin. Among plans of equal cost, the first one is taken."""
        return (
            self.reduce_then_move,
            self.scatter_then_reduce,
            self.scatter_then_move,
            self.move_then_reduce,
            partial(reduce_by_one_exchange, self),
            partial(reduce_group_by_group, self),
            partial(reduce_parts_by_exchange, self),
        )

    def _most_collectives(self) -> int:
        """Return how many collectives a plan may have: as many as axes that it reduces
        over or whose cuts must be undone; at most two if there is a group of all."""
        one_per_axis = len(self.axes | misplaced(self.before, self.after))
        return (
            min(one_per_axis, 2)
            if self.groups.has(self.axes | self.crossed)
            else one_per_axis
        )

    def _exact(self, step: ReduceScatter) -> bool:
        """True if a reduce-scatter sends all that is held, and no padding."""
        return (
            step.before == self.before and step.ranks * step.chunk == self.before.most
        )

    def reduce_then_move(self) -> Iterator[Beginning]:
        """All-reduce what each rank has, or the part that the target wants; then
        move."""
        for narrow in self.scatters.narrowed():
            yield (
                self.all_reduce(self.before, narrow, self.axes),
                narrow.without_pending(self.axes),
            )

    def scatter_then_move(self) -> Iterator[Beginning]:
        """Reduce-scatter along all the axes; then move or gather the parts."""
        for narrow in self.scatters.narrowed():
            first = () if narrow == self.before else (Narrow(self.before, narrow),)
            for cut in self.scatters.cuts(narrow):
                yield (*first, *self._reduce_scatter(narrow, cut, self.axes)), cut

    def scatter_then_reduce(self) -> Iterator[Beginning]:
        """Reduce-scatter over the axes that cut the target, then all-reduce the smaller
        result over the others. Not if the move that follows is a third collective."""
        first = self.axes & self.after.sharded
        rest = self.axes - first
        if not (first and rest):
            return
        start = self.before.without_pending(first)
        cut = cut_toward(start, self.after, start.free)
        if not cut.sharded.issuperset(first):
            return
        # Otherwise the move that follows would be a third collective.
        if not self.groups.has(self.axes) or not crossed(cut, self.after):
            scattered = self._reduce_scatter(self.before, cut, first)
            yield (
                (*scattered, *self.all_reduce(cut, cut, rest)),
                cut.without_pending(rest),
            )

    def move_then_reduce(self) -> Iterator[Beginning]:
        """Move into boxes from which the target can be cut, then reduce there: by a
        reduce-scatter if all axes of the reduction cut the target, else by
        all-reduces."""
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
        """Return the steps that all-reduce the part in `narrow`, by as few groups as
        cover these axes, after a narrow where it isn't all of `before`."""
        steps: list[Step] = [] if narrow == before else [Narrow(before, narrow)]
        for group in self.groups.cover(axes):
            then = narrow.without_pending(group)
            steps.append(AllReduce(narrow, then, group, self.op))
            narrow = then
        return tuple(steps)

    def _reduce_scatter(
        self, before: Regions, cut: Regions, axes: frozenset[int]
    ) -> Steps:
        """Return the steps that reduce-scatter into `cut`; without the joint group one
        group after the other, outer cuts first."""
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
        """Return the next group to reduce over from `now` to `cut`, and the boxes
        then."""
        for group in self.groups.within(left):
            then = cut_toward(now.without_pending(group), cut, now.free.union(group))
            if then.sharded.issuperset(group):
                return group, then
        raise AssertionError(
            f"none of the axes {sorted(left)} makes the next cut from {now} to {cut}"
        )


def _until(order: tuple[int, ...], stops: frozenset[int]) -> tuple[int, ...]:
    """Return the order before the first of its axes that is among `stops`."""
    depth = next((i for i, axis in enumerate(order) if axis in stops), len(order))
    return order[:depth]


def reduce_by_one_exchange(reduction: Reduction) -> Iterator[Beginning]:
    """All-to-all that brings each rank all terms of what it wants; the rank reduces
    them itself. That is best where each rank wants little. Yields nothing without a
    group over all axes that talk.

    For example, a (16, 16) tensor of 4-byte elements goes from R·S0·P to R·S1·S1 on (2,
    2, 2). This is all_to_all(b,c) sum 384 B; without this function it would be
    reduce_scatter(c) 256 B, all_to_all(b,c) 192 B.
    """
    if reduction.groups.has(reduction.axes | reduction.crossed):
        yield from _exchanges(reduction, reduction.after)


def _exchanges(reduction: Reduction, then: Regions) -> Iterator[Beginning]:
    """Yield the all-to-alls to the boxes of `then` that bring each rank all terms.
    Those of an average are divided before they are sent: their sum may overflow
    float16."""
    group, reduced = (
        tuple(sorted(axes))
        for axes in (reduction.axes | crossed(reduction.before, then), reduction.axes)
    )
    op, division = (
        (reduction.op, ())
        if reduction.op != "avg"
        else ("sum", (Divide(reduction.groups.count(reduced)),))
    )
    for step in all_to_alls(
        Exchange(reduction.before, then, group, reduced),
        reduction.before.free,
        reduction.groups,
        op,
    ):
        yield (*division, step), then


def reduce_group_by_group(reduction: Reduction) -> Iterator[Beginning]:
    """Reduce-scatter as soon as a cut of the target fits. If none fits, all-reduce at
    once, or move until one does. Axes that don't cut the target are all-reduced at the
    end. Yields nothing if there is a group over all axes that talk: then other ways
    take two collectives at most.

    For example, a (64, 64) tensor of 4-byte elements goes from P·P·S0 to S0·R·S1 on (2,
    2, 2). Without joint groups this is all_to_all(c), reduce_scatter(a), all_reduce(b),
    4096 B each.
    """
    if reduction.groups.has(reduction.axes | reduction.crossed):
        # With that group the other ways take two collectives at most.
        return
    for early in (True, False):
        steps: list[Step] = []
        now = reduction.before
        while reduction.axes & now.pending:
            added, now = _reduce_or_move(reduction, now, early)
            steps += added
        yield tuple(steps), now


def _reduce_or_move(reduction: Reduction, now: Regions, early: bool) -> Beginning:
    """Return the next steps of `reduce_group_by_group`, and the regions after them."""
    narrow = cut_toward(now, reduction.after, now.free)
    first = () if narrow == now else (Narrow(now, narrow),)
    pending = reduction.axes & now.pending
    for group in reduction.groups.within(pending):
        then = cut_toward(
            narrow.without_pending(group), reduction.after, narrow.free.union(group)
        )
        if then.sharded.issuperset(group):
            return (*first, ReduceScatter(narrow, then, group, reduction.op)), then
    if early or pending.isdisjoint(reduction.after.sharded):
        return (
            *first,
            *reduction.all_reduce(narrow, narrow, pending),
        ), narrow.without_pending(pending)
    steps, then = next_collective(
        narrow, reduction.after, reduction.groups, reduction.itemsize, reduction.cost
    )
    return (*first, *steps), then


def reduce_parts_by_exchange(reduction: Reduction) -> Iterator[Beginning]:
    """If only a group over all axes that talk is at hand: by an all-to-all over it,
    each rank gets all terms of a part that no other rank has, and reduces them itself.
    Then the parts move.

    In the example of `reduce_group_by_group`, all joint groups give reduce_scatter(a,b)
    6144 B, all_to_all(a,b,c) 4096 B. With only the group over a, b and c this is
    all_to_all(a,b,c) sum 8192 B, all_gather(b) 2048 B, where `reduce_by_one_exchange`
    would bring 16384 B.
    """
    group = reduction.axes | reduction.crossed
    if reduction.groups.has(reduction.axes) or not reduction.groups.has(group):
        return
    orders = zip(reduction.before.orders, reduction.after.orders)
    start = reduction.before.cut(
        [old[: common_prefix(old, new)] for old, new in orders]
    ).without_pending(reduction.axes)
    wanted = cut_toward(start, reduction.after, start.free)
    first = reduction.scatters.spread(wanted, sorted(group - wanted.sharded))
    for cut in dict.fromkeys((first, *reduction.scatters.movable(start, group))):
        if reduction.groups.has(reduction.axes | crossed(reduction.before, cut)):
            yield from _exchanges(reduction, cut)


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
    """Return the steps from `source` to `target`, for elements of `itemsize` bytes: the
    fastest by `cost`; where a reduction ends, of those that bring the fewest bytes. If
    every joint group exists, one collective at most, or two where a reduction ends."""
    steps, _ = plan_at_once(source, target, itemsize, groups, cost)
    return in_rounds(steps, itemsize, cost)


def plan_at_once(
    source: Regions,
    target: Regions,
    itemsize: int,
    groups: Iterable[Iterable[int]] | None,
    cost: Cost,
) -> Searched:
    """`plan` before large steps are split into rounds, and the dims that it tried to
    cut."""
    if (source.shape, source.sizes) != (target.shape, target.sizes):
        raise ValueError(
            f"no way from {source.shape} on {source.sizes} to {target.shape} on "
            f"{target.sizes}"
        )
    have = Groups.of(groups, source.sizes)
    new_terms = _new_terms(source, target)
    if not new_terms:
        return _reduce_and_move(source, target, have, itemsize, cost)
    steps = _plan_with_terms(source, target, new_terms, have, itemsize, cost)
    # Which dims were tried where new terms are made isn't known, so assume all.
    return steps, frozenset(range(len(source.shape)))


def _plan_with_terms(
    source: Regions,
    target: Regions,
    new_terms: frozenset[int],
    have: Groups,
    itemsize: int,
    cost: Cost,
) -> Steps:
    """Plan a change in which values become terms of a pending reduction."""
    last = _embed_last(source, target, new_terms, have, itemsize, cost)
    first = (
        _embed_first(source, target, new_terms, have, itemsize, cost)
        if new_terms & source.sharded
        else last
    )
    # Allow one collective for each reduction that ends, and one for each cut that must
    # be undone and doesn't become a term. `first` never has more: each of its
    # collectives ends one of these reductions or undoes one of these cuts for good. So
    # at least one of the two plans is left.
    limit = min(
        collectives(last),
        len(
            (source.pending - target.pending) | (misplaced(source, target) - new_terms)
        ),
    )
    steps = cost.fastest(
        [steps for steps in (last, first) if collectives(steps) <= limit], itemsize
    )
    # A replica becomes equal terms of a sum. Terms of avg, max and min keep the value.
    parts = math.prod(
        source.sizes[a]
        for a in new_terms - source.sharded
        if target.partial[a] == "sum"
    )
    return steps if parts == 1 else (*steps, Divide(parts))


def _embed_last(
    source: Regions,
    target: Regions,
    new_terms: frozenset[int],
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> tuple[Step, ...]:
    """Go to the boxes of the target, still cut by the axes whose shards become terms of
    a sum; then embed each shard in zeros.

    For example, S0·S0 to S0·P on (2, 2): nothing moves, and the zeros are where axis 1
    cut.
    """
    partial_before = tuple(
        None if axis in new_terms else op for axis, op in enumerate(target.partial)
    )
    orders = [
        new + tuple(a for a in old if a in new_terms)
        for old, new in zip(source.orders, target.orders)
    ]
    before_embed = Regions(target.shape, target.sizes, tuple(orders), partial_before)
    steps, _ = _reduce_and_move(source, before_embed, groups, itemsize, cost)
    return (
        steps
        if before_embed.orders == target.orders
        else (*steps, Embed(before_embed, target))
    )


def _embed_first(
    source: Regions,
    target: Regions,
    new_terms: frozenset[int],
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> tuple[Step, ...]:
    """Embed each shard in zeros as soon as no other axis cuts it further, then go to
    the boxes of the target.

    For example, R·S0 to S0·P on (2, 2): each rank embeds its shard, R·P, and narrows
    the result. From S0·S0 to P·S0, axis 1 cuts the shards of axis 0 further: an
    all-gather over axis 1, then embed the shard of axis 0, then narrow.
    """
    steps: list[Step] = []
    now = _with_terms(source, target, new_terms)
    while True:
        embedded = _with_terms(
            now.cut([_without_innermost(order, new_terms) for order in now.orders]),
            target,
            new_terms,
        )
        if embedded != now:
            steps.append(Embed(now, embedded))
            now = embedded
        if new_terms.isdisjoint(now.sharded):
            tail, _ = _reduce_and_move(now, target, groups, itemsize, cost)
            return (*steps, *tail)
        uncovered = now.cut(
            [_until_innermost(order, new_terms) for order in now.orders]
        )
        steps += move(now, uncovered, groups, itemsize, cost)
        now = uncovered


def _with_terms(now: Regions, target: Regions, axes: frozenset[int]) -> Regions:
    """Return `now` with the target's pending values, of the axes that cut no more."""
    terms = axes - now.sharded
    partial = tuple(
        [
            new if axis in terms else old
            for axis, (old, new) in enumerate(zip(now.partial, target.partial))
        ]
    )
    return Regions(now.shape, now.sizes, now.orders, partial)


def _without_innermost(order: tuple[int, ...], axes: frozenset[int]) -> tuple[int, ...]:
    """Return the order without its innermost axes, as long as they are among `axes`."""
    while order and order[-1] in axes:
        order = order[:-1]
    return order


def _until_innermost(order: tuple[int, ...], axes: frozenset[int]) -> tuple[int, ...]:
    """Return the order up to the last of its axes in `axes`; all of it if there is
    none."""
    last = max(
        [depth for depth, axis in enumerate(order) if axis in axes],
        default=len(order) - 1,
    )
    return order[: last + 1]


def _reduce_and_move(
    source: Regions,
    target: Regions,
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> Searched:
    """Plan a change that makes no new terms."""
    ended = source.pending - target.pending
    if not ended:
        return move(source, target, groups, itemsize, cost), frozenset()
    if 0 in source.shape and source.orders != target.orders:
        # There is nothing to reduce. With equal boxes the plan is all-reduces all the
        # same, since compiled code has one pure reduction for all sizes.
        return (Narrow(source, target),), frozenset()
    ops = {op for axis, op in enumerate(source.partial) if op and axis in ended}
    # A sum and an average mix: all terms are divided by the number of ranks that are
    # averaged, then summed. Dividing first, as NCCL does, keeps the sum of many terms
    # from overflowing float16.
    op, terms = ops.pop(), 1
    if ops:
        op, terms = (
            "sum",
            math.prod(source.sizes[a] for a in ended if source.partial[a] == "avg"),
        )
    reduction = Reduction(source, target, ended, op, groups, itemsize, cost)
    steps = reduction.best()
    if terms > 1:
        steps = (Divide(terms), *steps)
    return steps, frozenset(reduction.scatters.tried)


def _new_terms(source: Regions, target: Regions) -> frozenset[int]:
    """Return the axes on which the target is pending and the source isn't."""
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
    """Return a plan as one line, with the bytes that the busiest rank receives."""
    text = ", ".join(_step_text(step, itemsize, names) for step in steps)
    return f"{source} → {target}: {text or 'nothing to do'}"


def _step_text(step: Step, itemsize: int, names: Sequence[str] | None) -> str:
    name = NAMES[type(step)]
    if isinstance(step, Divide):
        return f"{name} by {step.by}"
    if not isinstance(step, Collective):
        return name
    axes = ",".join(names[a] if names else chr(ord("a") + a) for a in step.axes)
    op = getattr(step, "op", None)
    label = "" if op in (None, "sum") and not getattr(step, "reduced", ()) else f" {op}"
    rounds = getattr(step, "rounds", 1)
    in_rounds = f" in {rounds} rounds" if rounds > 1 else ""
    return f"{name}({axes}){label} {arriving(step) * itemsize} B{in_rounds}"


def flatten_call(axes: Sequence[int], names: Names) -> str:  # overlay only
    """Return the call that makes a group over several axes, or says which it is.

    >>> flatten_call((0, 1), ("dp", "cp", "tp"))
    'mesh["dp", "cp"].flatten("dp_cp")'
    """
    if not names:
        return f"a group over axes {tuple(axes)} of a mesh without names"
    chosen = [str(names[axis]) for axis in axes]
    listed = ", ".join(f'"{name}"' for name in chosen)
    return f'mesh[{listed}].flatten("{"_".join(chosen)}")'
