"""Plans: the steps from one spec to another, and the line that shows them.

From Partial("sum"), Shard(0) to Replicate(), Replicate() on a (2, 2) mesh:

>>> source = Regions.of((None, 0), ("sum", None), (8, 4), (2, 2))
>>> target = Regions.of((None, None), (None, None), (8, 4), (2, 2))
>>> print(line(source, target, plan(source, target, itemsize=4), itemsize=4))
P·S0 → R·R: all_reduce(a) 64 B, all_gather(b) 64 B

A plan is a tuple of steps, the same on every rank; `steps` says how to run each. The first step starts in the boxes of
`source`, each other one where the one before it ended, and the last one ends in the boxes of `target`. Keep a plan, and
for each step the lists of one's own coordinate, for as long as the arguments are the same: all of them are hashable,
if `groups` is.

Rounds: a large exchange runs part by part, so that what is packed and what arrives take no more than the source.

An exchange over several axes at once may bring a rank many times what it holds, as pieces that lie one after the other
until they are put in their places. One axis at a time has less to hold. So each piece of a large one is cut into about
equal parts, and each round moves one part of every piece: the same elements to the same ranks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from .cost import Cost, Groups, arriving, collectives, leaving
from .moves import misplaced, move
from .reductions import Reduction
from .regions import Box, NotPlanned, Regions, cut_last
from .steps import AllGather, AllReduce, AllToAll, Collective, Divide, Embed, Narrow, ReduceScatter, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


def in_rounds(steps: tuple[Step, ...], itemsize: int, cost: Cost) -> tuple[Step, ...]:
    """The same steps, the large ones in rounds."""
    if bytes_of(steps, itemsize) < 2 * cost.round_bytes:
        return steps
    return tuple([_in_rounds(step, is_view, itemsize, cost) for step, is_view in with_views(steps)])


def with_views(steps: Sequence[Step]) -> Iterator[tuple[Step, bool]]:
    """Each step, and whether it begins with a part of a local tensor."""
    return zip(steps, [False, *[isinstance(step, Narrow) for step in steps]])


def in_one_round(steps: tuple[Step, ...], *kinds: type[AllToAll | ReduceScatter]) -> tuple[Step, ...]:
    """The same steps, those of these kinds in one round."""
    return tuple([dataclasses.replace(step, rounds=1) if isinstance(step, kinds) else step for step in steps])


def bytes_of(steps: Sequence[Step], itemsize: int) -> int:
    """Of the whole tensor, if anything is sent."""
    step = next((step for step in steps if isinstance(step, Collective)), None)
    return 0 if step is None else math.prod(step.before.shape) * itemsize


def _in_rounds(step: Step, is_view: bool, itemsize: int, cost: Cost) -> Step:
    """In so many rounds that none holds more than there is room for, but with so many bytes in each that it is worth
    one."""
    if not isinstance(step, (AllToAll, ReduceScatter)):
        return step
    staged, most = staged_and_most_rounds(step, is_view)
    rounds = min(most, staged * itemsize // cost.round_bytes)
    # Rounded up to a power of two: most dims can be cut evenly into that many.
    return dataclasses.replace(step, rounds=1 << (rounds - 1).bit_length()) if rounds > 1 else step


def staged_and_most_rounds(step: AllToAll | ReduceScatter, is_view: bool) -> tuple[int, int]:
    """The elements that a step packs and receives; and the rounds in which it holds no more of them at once than the
    rank has (about as much where cuts are uneven), or for a reduce-scatter half of what it would pack.

    Args:
        is_view: the step begins with a part of a local tensor.
    """
    if len(step.axes) == 1:
        return 0, 1  # one axis: redistributing one mesh dim after the other holds as much
    if isinstance(step, AllToAll):
        staged, room = arriving(step) + leaving(step), step.before.most
    elif (is_view or cut_last(step.before, step.after, step.axes) != 0) and step.after.is_even:
        packed = step.ranks * step.chunk
        staged, room = packed + step.chunk, packed // 2
    else:
        return 0, 1  # where dim 0 is cut nothing is packed; uneven pieces are padded, and can't be cut all alike
    return staged, -(-staged // max(room, 1))


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


NAMES: Mapping[type[Step], str] = {
    Narrow: "narrow",
    Embed: "embed",
    Divide: "divide",
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
}
_KEPT_BY = ("avg", "max", "min")  # those for which Partial._partition_value keeps the value


def plan(
    source: Regions,
    target: Regions,
    itemsize: int,
    groups: Iterable[Iterable[int]] | None = None,
    cost: Cost = Cost(),
) -> tuple[Step, ...]:
    """The steps from `source` to `target`, for elements of `itemsize` bytes: of the plans that are tried, the fastest
    by `cost`. Where a reduction ends, it is the fastest of those that bring the fewest bytes.

    Where every joint group exists, that is at most one collective if no reduction ends, else at most two; where `cost`
    knows the speed of axes, a move may be more of them.

    Args:
        groups: tuples of axes for which a joint group exists; single axes always have one. None: all exist.

    Raises:
        ValueError: source and target are of different tensors or meshes.
        NotPlanned: the target asks for a pending reduction that can't be made from what the source has.
    """
    return in_rounds(plan_at_once(source, target, itemsize, groups, cost), itemsize, cost)


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
        tried: gets the dims that some candidate was made to cut by `Scatters`, those of source and target among them;
            none where new terms are made.
    """
    if (source.shape, source.sizes) != (target.shape, target.sizes):
        raise ValueError(f"no way from {source.shape} on {source.sizes} to {target.shape} on {target.sizes}")
    have = Groups.of(groups, source.sizes)
    return _with_reductions(source, target, have, itemsize, cost, tried)


def _with_reductions(
    source: Regions, target: Regions, have: Groups, itemsize: int, cost: Cost, tried: set[int] | None
) -> tuple[Step, ...]:
    made = _made_pending(source, target)
    if not made:
        return _reduce_and_move(source, target, have, itemsize, cost, tried)
    last = _embed_last(source, target, made, have, itemsize, cost)
    first = _embed_first(source, target, made, have, itemsize, cost) if made & source.sharded else last
    # At most one collective for each reduction that ends, and one for each cut that has to go and becomes no term.
    # `first` has no more: each of its collectives ends one of these reductions or gives up one of these cuts, and none
    # of them comes back. So one of both stays.
    most = min(collectives(last), len((source.pending - target.pending) | (misplaced(source, target) - made)))
    steps = cost.fastest([found for found in (last, first) if collectives(found) <= most], itemsize)
    parts = math.prod(source.sizes[a] for a in made - source.sharded if target.partial[a] == "sum")
    return steps if parts == 1 else (*steps, Divide(parts))


def _embed_last(
    source: Regions,
    target: Regions,
    made: frozenset[int],
    groups: Groups,
    itemsize: int,
    cost: Cost,
) -> tuple[Step, ...]:
    """To the target's boxes, still cut by the axes whose shards become terms of a sum; then the zeros around them.

    For example, S0·S0 to S0·P on (2, 2): nothing moves, and the zeros are where axis 1 cut.
    """
    kept = tuple(None if axis in made else op for axis, op in enumerate(target.partial))
    orders = [new + tuple(a for a in old if a in made) for old, new in zip(source.orders, target.orders)]
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
    """The zeros around each shard as soon as no other axis cuts inside of it, then to the target's boxes.

    For example, R·S0 to S0·P on (2, 2): each rank puts zeros around its shard, R·P, and narrows that. From S0·S0 to
    P·S0, axis 1 cuts inside of axis 0: an all-gather over axis 1, zeros around what axis 0 cut, then a narrow.
    """
    steps: list[Step] = []
    now = _with_terms(source, target, made)
    while True:
        outer = _with_terms(now.cut([_without_last(order, made) for order in now.orders]), target, made)
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
    partial = tuple([new if axis in terms else old for axis, (old, new) in enumerate(zip(now.partial, target.partial))])
    return Regions(now.shape, now.sizes, now.orders, partial)


def _without_last(order: tuple[int, ...], made: frozenset[int]) -> tuple[int, ...]:
    while order and order[-1] in made:
        order = order[:-1]
    return order


def _until_last(order: tuple[int, ...], made: frozenset[int]) -> tuple[int, ...]:
    """Without what is inside of the last cut by `made`; all of it if there is none."""
    last = max([depth for depth, axis in enumerate(order) if axis in made], default=len(order) - 1)
    return order[: last + 1]


def _reduce_and_move(
    source: Regions, target: Regions, groups: Groups, itemsize: int, cost: Cost, tried: set[int] | None = None
) -> tuple[Step, ...]:
    ended = source.pending - target.pending
    if not ended:
        return move(source, target, groups, itemsize, cost)
    if 0 in source.shape and source.orders != target.orders:
        return (Narrow(source, target),)  # nothing to reduce; else it's all-reduces, as for all other sizes
    ops = {op for axis, op in enumerate(source.partial) if op and axis in ended}
    # Sums and averages mix: all terms are divided by the number of ranks that are averaged, and then summed. They are
    # divided before the sum, as NCCL does it: the sum of many may be more than a short floating-point number can be.
    op, terms = ops.pop(), 1
    if ops:
        op, terms = "sum", math.prod(source.sizes[a] for a in ended if source.partial[a] == "avg")
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
            raise NotPlanned(f"axis {axis}: a pending {old} can't become a pending {new}")
        if axis in source.sharded and new != "sum":
            raise NotPlanned(f"axis {axis}: a shard can't become a term of {new}")
        if new != "sum" and new not in _KEPT_BY:
            raise NotPlanned(f"axis {axis}: a value can't be split into terms of {new}")
    return target.pending - source.pending


def line(
    source: Regions, target: Regions, steps: Sequence[Step], itemsize: int, names: Sequence[str] | None = None
) -> str:
    """A plan as one line: the specs, and each step with its axes and the bytes that it brings to a rank at most.

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


def flatten_call(axes: Sequence[int], names: Sequence[str] | None) -> str:  # overlay only
    """The call on a mesh, whose axes have these names, that makes a group over several of them.

    >>> flatten_call((0, 1), ("dp", "cp", "tp"))
    'mesh["dp", "cp"].flatten("dp_cp")'
    """
    if not names:
        return f"a group over axes {tuple(axes)} of a mesh without names"
    chosen = [str(names[axis]) for axis in axes]
    listed = ", ".join(f'"{name}"' for name in chosen)
    return f'mesh[{listed}].flatten("{"_".join(chosen)}")'


Steps = tuple[Step, ...]
