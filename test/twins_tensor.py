"""The slow twin of redistribution: a whole tensor in plain Python, its shards cut by hand, and all ranks run in one
process without communication.

The tensor's elements are numbered 0 to n-1 in row-major order, and a local tensor is a list in row-major order. Nothing
here uses the regions or boxes of the code under test, except that `run` does what a step tells it.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

from torch_overlay.distributed.tensor._planner import steps as st
from torch_overlay.distributed.tensor._planner.cost import Cost, arriving, collectives, leaving
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.sizes import shared_plan, step_on_shape

REDUCE = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,  # divided at the end, by `reduced`
    "max": max,
    "min": min,
    "product": lambda a, b: a * b,
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}


def without_sizes(steps):
    """The steps without the sizes of the tensor."""
    return tuple([step_on_shape(step, ()) for step in steps])


def coordinates(sizes):
    """All coordinates of a mesh, row-major."""
    return list(itertools.product(*map(range, sizes)))


def pieces(indices, parts):
    """A list cut by hand as torch.chunk does, with empty pieces to make up the number."""
    step = max(1, math.ceil(len(indices) / parts))
    found = [indices[i : i + step] for i in range(0, len(indices), step)]
    return found + [[]] * (parts - len(found))


def rows(placements, shape, sizes, coordinate, order=None):
    """The indices along each dim that a coordinate holds, cut axis by axis.

    Placements are pairs such as ("S", 0), ("SS", 0, 2) for a strided shard, ("P", "sum"), ("R",). ("FS", 0, 2) is the
    strided shard of FSDP2, which cuts what the other axes have cut. `order` lists axes in the order in which they cut;
    ascending if not given.
    """
    found = [list(range(n)) for n in shape]
    ascending = sorted(range(len(sizes)), key=lambda axis: placements[axis][0] == "FS")
    for axis in order if order is not None else ascending:
        kind, *rest = placements[axis]
        if kind in ("S", "FS"):
            found[rest[0]] = pieces(found[rest[0]], sizes[axis])[coordinate[axis]]
        elif kind == "SS":
            dim, factor = rest
            mine = [pieces(part, sizes[axis])[coordinate[axis]] for part in pieces(found[dim], factor)]
            found[dim] = [i for part in mine for i in part]
    return found


def held(placements, shape, sizes, coordinate, order=None):
    """The numbers of the elements that a coordinate holds, row-major; see `rows`."""
    found = rows(placements, shape, sizes, coordinate, order)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return [sum(i * s for i, s in zip(place, strides)) for place in itertools.product(*found)]


def term(element, place):
    """The contribution to an element of the coordinates `place` on the pending axes: made so that another term, a
    missing or a doubled one changes every reduction."""
    seed = element * 2654435761 + 97
    for p in place:
        seed = (seed ^ (p + 1) * 40503) * 1103515245 + 12345
    return seed // 65536 % 1021 + 1


def reduced(op, values):
    """The reduction of a list of terms."""
    total = functools.reduce(REDUCE[op], values)
    return Fraction(total, len(values)) if op == "avg" else total


def value(element, placements, sizes, known):
    """An element, reduced over its pending axes but for those in `known`, a dict from axis to coordinate."""
    axes = [a for a, p in enumerate(placements) if p[0] == "P"]
    return _reduce_axes(element, placements, sizes, axes, dict(known))


def _reduce_axes(element, placements, sizes, axes, known):
    for axis in axes:
        if axis not in known:
            terms = [_reduce_axes(element, placements, sizes, axes, {**known, axis: i}) for i in range(sizes[axis])]
            return reduced(placements[axis][1], terms)
    return term(element, [known[a] for a in axes])


def start(placements, shape, sizes, order=None):
    """The local tensors of all coordinates."""
    pending = [a for a, p in enumerate(placements) if p[0] == "P"]
    return {
        c: [term(e, [c[a] for a in pending]) for e in held(placements, shape, sizes, c, order)]
        for c in coordinates(sizes)
    }


def wrong(source, target, shape, sizes, locals_, order=None):
    """The first coordinate whose local tensor isn't what the target says, with what it is and what it should be; None
    if all are right. New terms are judged by what they reduce to."""
    new = [a for a, p in enumerate(target) if p[0] == "P" and source[a][0] != "P"]
    kept = [a for a, p in enumerate(target) if p[0] == "P" and source[a][0] == "P"]
    for c in coordinates(sizes):
        want = [value(e, source, sizes, {a: c[a] for a in kept}) for e in held(target, shape, sizes, c, order)]
        got = locals_[c]
        if new and len(got) == len(want):
            got = _together(target, sizes, c, new, locals_)
        if got != want:
            return c, got, want
    return None


def _together(target, sizes, coordinate, axes, locals_):
    if not axes:
        return locals_[coordinate]
    axis, *rest = axes
    at = [coordinate[:axis] + (i,) + coordinate[axis + 1 :] for i in range(sizes[axis])]
    terms = [_together(target, sizes, c, rest, locals_) for c in at]
    return [reduced(target[axis][1], list(column)) for column in zip(*terms)]


# --- one redistribution, as data ---


def placed(placements):
    """Placements as the planner takes them: by axis the dim, the reduction and the split factor."""
    dims = [p[1] if p[0] in ("S", "SS") else None for p in placements]
    ops = [p[1] if p[0] == "P" else None for p in placements]
    return dims, ops, [p[2] if p[0] == "SS" else 1 for p in placements]


def regions(placements, shape, sizes, order=None):
    """The code under test's reading of placements and of the order in which axes cut."""
    pairs = None
    if order is not None:
        pairs = [(d, [a for a in order if placements[a] == ("S", d)]) for d in range(len(shape))]
    dims, ops, factors = placed(placements)
    return Regions.of(dims, ops, shape, sizes, pairs, factors)


@dataclass(frozen=True)
class Case:
    """A redistribution to plan and run. Its repr is code that makes it again."""

    source: tuple
    target: tuple
    shape: tuple
    sizes: tuple
    groups: tuple | None = None
    source_order: tuple | None = None
    target_order: tuple | None = None
    itemsize: int = 4
    cost: Cost = Cost()

    def ends(self):
        """Source and target as the planner sees them."""
        one = regions(self.source, self.shape, self.sizes, self.source_order)
        return one, regions(self.target, self.shape, self.sizes, self.target_order)

    def steps(self):
        """The plan."""
        return shared_plan(*self.ends(), self.itemsize, self.groups, self.cost)

    def problem(self):
        """What is wrong with the plan, as a sentence, or None."""
        steps = self.steps()
        after = run(steps, start(self.source, self.shape, self.sizes, self.source_order))
        found = wrong(self.source, self.target, self.shape, self.sizes, after, self.target_order)
        if found:
            return f"at {found[0]}: {found[1]} instead of {found[2]}"
        return self.waste(steps)

    def waste(self, steps):
        """What is wrong with the plan's promises on collectives, groups and bytes, or None."""
        reduces = any(s[0] == "P" and t[0] != "P" for s, t in zip(self.source, self.target))
        if self.groups is None and collectives(steps) > 1 + reduces:
            return f"{collectives(steps)} collectives"
        moves = [step for step in steps if isinstance(step, st.Collective)]
        for step in moves:
            if self.groups is not None and len(step.axes) > 1 and step.axes not in self.axes_at_hand():
                return f"no group over {step.axes}"
            if not self.concerned().issuperset(step.axes):
                return f"{step.axes} talk, of which only {sorted(self.concerned())} have a reason to"
            sent, received = ({c: count(step, c) for c in coordinates(self.sizes)} for count in (sends, gets))
            most_out, most_in = leaving(step), arriving(step)
            for c in coordinates(self.sizes):
                if received[c] > most_in:
                    return f"{step} brings {received[c]} elements to {c}, said to be {most_in}"
                if sent[c] > most_out * (1 if _counted_exactly(step) else 2):
                    return f"{c} sends {sent[c]} elements in {step}, said to be {most_out}"
            if sum(sent.values()) != sum(received.values()):
                return f"{step} sends {sum(sent.values())} elements, of which {sum(received.values())} arrive"
        if not reduces and len(moves) == 1 and isinstance(moves[0], st.AllToAll):
            return self._more_than_lacking(received)
        return None

    def concerned(self):
        """The axes along which a collective may talk: their placement changes, or that of an axis that cuts the same
        dim before they do, so that torch too gathers what they cut. Of size 1 there are none."""
        found = {a for a, (old, new) in enumerate(zip(self.source, self.target)) if old != new and self.sizes[a] > 1}
        ends = (self.source, self.source_order), (self.target, self.target_order)
        for axis, placement in enumerate(self.source):
            if placement[0] in ("S", "SS") and placement == self.target[axis] and self.sizes[axis] > 1:
                before, after = (self._outer(axis, placements, order) for placements, order in ends)
                found.update({axis} if before != after else ())
        return found

    def _outer(self, axis, placements, order):
        """The cuts of this axis's dim before its own; where one is strided all of them, since it cuts after others."""
        order = list(range(len(self.sizes)) if order is None else order)
        dim = placements[axis][1]
        cuts = [(a, *placements[a]) for a in order if self.sizes[a] > 1 and placements[a][0] in ("S", "SS")]
        cuts = [cut for cut in cuts if cut[2] == dim]
        strided = any(cut[1] == "SS" for cut in cuts)
        return [cut for cut in cuts if strided or order.index(cut[0]) < order.index(axis)]

    def axes_at_hand(self):
        """The groups as sorted tuples without axes of size 1."""
        return {tuple(sorted(a for a in group if self.sizes[a] > 1)) for group in self.groups}

    def _more_than_lacking(self, received):
        target = [p if p[0] != "P" else ("R",) for p in self.target]
        if target != list(self.target):
            return None
        for c in coordinates(self.sizes):
            has = set(held(self.source, self.shape, self.sizes, c, self.source_order))
            lacks = set(held(target, self.shape, self.sizes, c, self.target_order)) - has
            if received[c] != len(lacks):
                return f"{c} lacks {len(lacks)} elements and gets {received[c]}"
        return None


# --- what a step brings ---


def _counted_exactly(step: st.Collective) -> bool:
    """Whether what the busiest rank sends follows from digits; at the ends of uneven chunks it may be a little more."""
    return step.before.is_even and step.after.is_even and not getattr(step, "diagonals", ())


def sends(step, coordinate):
    """The elements that go to others: where each rank passes on in a ring what it gets, as many as arrive."""
    return _to_others(step, coordinate, step.sends(coordinate)) if isinstance(step, st.AllToAll) else step.received


def gets(step, coordinate):
    """The elements that arrive from others."""
    return _to_others(step, coordinate, step.receives(coordinate)) if isinstance(step, st.AllToAll) else step.received


def _to_others(step, coordinate, pieces):
    members = step.members(coordinate)
    return sum(piece.box.elements for piece in pieces if members[piece.member] != tuple(coordinate))


# --- all ranks in one process ---


def run(steps, locals_):
    """The local tensors of all coordinates after a plan. Checks on the way what a runner and a backend rely on."""
    for step in steps:
        locals_ = _RUN[type(step)](step, locals_)
    return locals_


def cells(box, lengths):
    """Where a box is in a flat local tensor of these lengths, row-major. An empty box is nowhere and needs not fit."""
    if not math.prod(box.length):
        return []
    assert all(s >= 0 and s + n <= m for s, n, m in zip(box.start, box.length, lengths)), (box, lengths)
    strides = [math.prod(lengths[d + 1 :]) for d in range(len(lengths))]
    ranges = [range(s, s + n) for s, n in zip(box.start, box.length)]
    return [sum(i * s for i, s in zip(place, strides)) for place in itertools.product(*ranges)]


def _cut(step, box, coordinate, flat):
    lengths = step.before.box(coordinate).length
    assert len(flat) == math.prod(lengths), (step, coordinate, len(flat), lengths)
    return [flat[i] for i in cells(box, lengths)]


def _paste(step, coordinate, arrived):
    """Boxes and their elements into the new local tensor: every element written once, and added to only after that."""
    lengths = step.after.box(coordinate).length
    result = [None] * math.prod(lengths)
    for piece, elements in arrived:
        where = cells(piece.box, lengths)
        assert len(where) == len(elements), (step, coordinate, piece, len(elements))
        for i, element in zip(where, elements):
            assert (result[i] is not None) == piece.add, (step, coordinate, piece, "written twice, or added to nothing")
            result[i] = REDUCE[step.op](result[i], element) if piece.add else element
    assert None not in result, (step, coordinate, "an element that nobody brought")
    return result


def _narrow(step, locals_):
    return {c: _cut(step, step.box(c), c, flat) for c, flat in locals_.items()}


def _embed(step, locals_):
    out = {}
    for c, flat in locals_.items():
        lengths = step.after.box(c).length
        out[c] = [0] * math.prod(lengths)
        for i, element in zip(cells(step.box(c), lengths), flat, strict=True):
            out[c][i] = element
    return out


def _divide(step, locals_):
    return {c: [Fraction(element, step.by) for element in flat] for c, flat in locals_.items()}


def _all_gather(step, locals_):
    out = {}
    for c in locals_:
        members = step.members(c)
        assert members[step.members(c).index(c)] == c
        assert all(len(locals_[m]) <= step.chunk for m in members)
        out[c] = _paste(step, c, [(p, locals_[members[p.member]]) for p in step.pieces(c)])
    return out


def _all_reduce(step, locals_):
    out = {}
    for c in locals_:
        terms = [locals_[m] for m in step.members(c)]
        assert len({len(t) for t in terms}) == 1
        out[c] = [reduced(step.op, list(column)) for column in zip(*terms)]
    return out


def _reduce_scatter(step, locals_):
    out = {}
    for c in locals_:
        members = step.members(c)
        terms = []
        for m in members:
            mine = [p for p in step.pieces(m) if p.member == members.index(c)]
            assert len(mine) <= 1
            terms.append([e for p in mine for e in _cut(step, p.box, m, locals_[m])])
        assert {len(t) for t in terms} == {math.prod(step.after.box(c).length)} and len(terms[0]) <= step.chunk
        out[c] = [reduced(step.op, list(column)) for column in zip(*terms)]
    return out


def _all_to_all(step, locals_):
    sent = {}
    for c, flat in locals_.items():
        members = step.members(c)
        for piece in step.sends(c):
            assert (c, members[piece.member]) not in sent
            sent[c, members[piece.member]] = _cut(step, piece.box, c, flat)
    out = {}
    for c in locals_:
        members = step.members(c)
        arrived = [(p, sent.pop((members[p.member], c))) for p in step.receives(c)]
        out[c] = _paste(step, c, arrived)
    assert not sent, (step, "sent to somebody who doesn't expect it", sorted(sent))
    return out


_RUN = {
    st.Narrow: _narrow,
    st.Embed: _embed,
    st.Divide: _divide,
    st.AllGather: _all_gather,
    st.AllReduce: _all_reduce,
    st.ReduceScatter: _reduce_scatter,
    st.AllToAll: _all_to_all,
}
