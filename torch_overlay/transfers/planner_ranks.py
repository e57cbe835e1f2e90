"""Plan tensors in pieces, each on one rank, so that no rank has to read the pieces of all others.

A mixture of experts has tens of thousands of tensors, and each trainer gives its rows of every one. So each name has a
planner: the rank that a hash of the name gives. All ranks that have tensors are planners. Start at `ask_planners`:

1. Each rank sends each planner a statement: which boxes it gives and wants of that planner's tensors.
2. The `Planner` compares what the ranks of a tensor state, plans which rank sends what to whom, and answers each rank
   with its own part. Tensors with equal shardings on both sides are planned once.
3. It asks for digests of the boxes that several ranks give, and compares them.
4. Its verdict goes to all ranks through the store: what is wrong, and which tensors there are in all.

A side on a mesh, or of plain tensors, is known to all ranks from their descriptions, and a planner reads it there. A
message has names and types as JSON, and one flat array of integers, so that reading it runs no code. All functions but
`ask_planners` send nothing, so that a test can have many ranks in one process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..distributed.tensor._planner.boxes import Box
from ._planner.piece_moves import Pieced, PlannedMove
from ._planner.routes import Routes, Share
from ._planner.sides import Ranks, Side
from .comparison import (
    SHOWN,
    UNCOVERED,
    differences,
    distinct_descriptions,
    join_side,
    lacking,
    raise_if_any,
    uncovered_text,
)
from .descriptions import SIDES, Description, Problem, Tensor
from .relays import end_of
from .replicas import replica_problems
from .sharding import Sharding, replicated_sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ..rendezvous.team import Team
    from ._planner.piece_moves import End
    from .descriptions import Data

_OTHERS = len(SIDES)  # stands in place of a side before the number of a name that is on a mesh, or plain
Numbers = tuple[int, int]  # of a piece of the source and of one of the target


def planner_of(name: str, planners: int) -> int:
    """Return the number of the planner that plans a tensor, from 0 to `planners - 1`."""
    return zlib.crc32(_encoded(name)) % planners


def key_of(name: str) -> int:
    """Hash a name to 64 bits. Planners tell all ranks the hashes of all names, so that also a rank without a part in a
    tensor can check `only=`."""
    return int.from_bytes(hashlib.blake2b(_encoded(name), digest_size=8).digest(), "little", signed=True)


def _encoded(name: str) -> bytes:
    """Return the bytes of a name, also of one with half of a surrogate pair, which UTF-8 refuses."""
    return name.encode(errors="surrogatepass")


def packed(words: Any, numbers: Sequence[int]) -> bytes:
    """Make a message of a value that JSON takes (`words`), and of integers of 64 bits. `unpacked` reads it."""
    head = json.dumps(words).encode()
    return len(head).to_bytes(8, "little") + head + array("q", numbers).tobytes()


def unpacked(message: bytes) -> tuple[Any, list[int]]:
    """Return the value and the integers from which `packed` made a message."""
    end = 8 + int.from_bytes(message[:8], "little")
    numbers = array("q")
    numbers.frombytes(message[end:])
    return json.loads(message[8:end]), numbers.tolist()


def in_pieces(shardings: Mapping[str, Sharding]) -> dict[str, Sharding]:
    """Return the shardings of the tensors that are in pieces, by name."""
    return {name: sharding for name, sharding in shardings.items() if sharding.pieces}


def without_pieces(said: Mapping[int, Description]) -> dict[int, Description]:
    """Return the descriptions of all ranks without tensors in pieces. Equal descriptions stay one object."""
    others: dict[int, Description] = {}
    for description, ranks in distinct_descriptions(said):
        sides = [
            {name: sharding for name, sharding in getattr(description, side).items() if not sharding.pieces}
            for side in SIDES
        ]
        digests = {name: seen for name, seen in (description.digests or {}).items() if name in sides[0]}
        others |= dict.fromkeys(ranks, description._replace(source=sides[0], target=sides[1], digests=digests))
    return others


def names_of_others(others: Mapping[int, Description]) -> list[str]:
    """Return the names that some rank has on a mesh, or plain, in order. Messages refer to them by position."""
    return sorted({name for each, _ in distinct_descriptions(others) for side in SIDES for name in getattr(each, side)})


# --- What a rank states to the planner of a tensor ---


def statements(sides: Sequence[Mapping[str, Sharding]], planners: int) -> tuple[list[bytes], list[list[list[str]]]]:
    """Write this rank's statement for each planner.

    A statement has each different sharding once, and then for each name the number of its sharding.
    """
    kinds: list[dict[Sharding, int]] = [{} for _ in range(planners)]
    names: list[list[list[str]]] = [[[], []] for _ in range(planners)]
    chosen: list[list[list[int]]] = [[[], []] for _ in range(planners)]
    for side, shardings in enumerate(sides):
        for name, sharding in shardings.items():
            planner = planner_of(name, planners)
            known = kinds[planner]
            names[planner][side].append(name)
            chosen[planner][side].append(known.setdefault(sharding, len(known)))
    messages = []
    for known, planner_names, sharding_numbers in zip(kinds, names, chosen):
        types: dict[tuple[str, str], int] = {}
        numbers: list[int] = []
        for sharding in known:
            boxes = sharding.pieces[0]
            numbers += [types.setdefault((sharding.dtype, sharding.device), len(types)), len(sharding.regions.shape)]
            numbers += [len(boxes), *sharding.regions.shape]
            for box in boxes:
                numbers += [*box.start, *box.length]
        numbers += itertools.chain(*sharding_numbers)
        messages.append(packed([[*types], len(known), planner_names], numbers) if known else b"")
    return messages, names


def stated(message: bytes) -> list[list[tuple[str, Sharding]]]:
    """Read a statement, which `statements` wrote on some rank. Returns for each side pairs of a name and its sharding,
    with the pieces of that rank; empty lists for an empty message."""
    if not message:
        return [[], []]
    (types, sharding_count, names), numbers = unpacked(message)
    at, kinds = 0, []
    for _ in range(sharding_count):
        kind, dims, boxes = numbers[at : at + 3]
        at += 3
        shape = tuple(numbers[at : at + dims])
        at += dims
        pieces = _boxes(numbers, at, boxes, dims)
        at += 2 * dims * boxes
        dtype, device = types[kind]
        kinds.append(replicated_sharding(dtype, shape, (), device)._replace(pieces=(tuple(pieces),)))
    sides = []
    for side_names in names:
        sides.append([*zip(side_names, map(kinds.__getitem__, numbers[at : at + len(side_names)]))])
        at += len(side_names)
    return sides


def _boxes(numbers: Sequence[int], at: int, count: int, dims: int) -> list[Box]:
    """Read `count` boxes of `dims` dims from integers, the first one at position `at`."""
    begins = [at + 2 * dims * number for number in range(count)]
    return [Box(tuple(numbers[n : n + dims]), tuple(numbers[n + dims : n + 2 * dims])) for n in begins]


# --- Plans ---


def numbers_of(tensor: Tensor, pieces: Pieced) -> list[Numbers]:
    """Return the pairs of piece numbers of a tensor between which elements may move. (0, 0) is always there."""
    if not (tensor.source.pieces and tensor.target.pieces):
        # A side on a mesh has one piece, which may meet each of the other side's.
        source_numbers, target_numbers = (range(max(map(len, side.pieces), default=1)) for side in tensor.sides)
        return [*itertools.product(source_numbers, target_numbers)]
    return sorted({(0, 0), *pieces.pairs(zip(tensor.target.ranks, tensor.target.pieces))})


class _Row(NamedTuple):
    """One tensor, as ranks state it.

    Attributes:
        stated: for each side, pairs of a rank and the number of the sharding that it states.
        places: for each statement that has the tensor: the rank, the side, and the tensor's position in the statement.
    """

    stated: tuple[list[Numbers], list[Numbers]]
    places: list[tuple[int, int, int]]


class _Plan(NamedTuple):
    """The plan of tensors with equal shardings on both sides.

    Attributes:
        names: of the tensors.
        tensor: the first one, which stands for all.
        pieces: the plan.
        numbers: the pairs of piece numbers between which elements may move.
        key: a hash of the shardings, the same on every planner. A rank packs tensors of one key together, whichever
            planners planned them.
    """

    names: list[str]
    tensor: Tensor
    pieces: Pieced
    numbers: list[Numbers]
    key: tuple[int, int]

    def numbers_for(self, rank: int) -> Iterator[int]:
        """Yield what a rank sends, receives and keeps, as integers, for each pair of piece numbers."""
        routes = self.pieces.routes_of(rank)
        for pair in self.numbers:
            yield from _numbers_of_routes(routes.get(pair))


class Planner:
    """Plans the tensors in pieces whose names hash to one rank. Making one plans them. Then come `answers`, `compare`
    and `verdict`, in this order, once each.

    Args:
        messages: for each rank its statement.
        others: for each rank its description without tensors in pieces.
        gone: ranks that have left, and send nothing.
        strict: whether a name that only one side has is a problem.

    Attributes:
        problems: what is wrong with these tensors.
        alone: for each side the names that only this side has.
    """

    def __init__(
        self,
        messages: Mapping[int, bytes],
        others: Mapping[int, Description],
        gone: frozenset[int] = frozenset(),
        strict: bool = True,
    ) -> None:
        self._gone, self._strict = gone, strict
        self._others = distinct_descriptions(others)
        self._number = {name: number for number, name in enumerate(names_of_others(others))}
        # Each different sharding has a number, so that tensors are grouped by integers.
        self._known: dict[Sharding, int] = {}
        self._shardings: list[Sharding] = []
        self._ends: dict[Sharding, End] = {}
        self._rows: dict[str, _Row] = {}
        for rank in sorted(messages):
            for side, names_and_shardings in enumerate(stated(messages[rank])):
                for place, (name, sharding) in enumerate(names_and_shardings):
                    row = self._rows.get(name)
                    if row is None:
                        row = self._rows[name] = _Row(([], []), [])
                    row.stated[side].append((rank, self._number_of(sharding)))
                    row.places.append((rank, side, place))
        self.problems: list[Problem] = []
        self._both = 0
        self.alone: tuple[list[str], list[str]] = [], []
        self._wanted: list[str] = []
        self._lost: list[str] = []
        self._asked: dict[int, list[tuple[str, Box]]] = {}
        # Names of equal shardings, with the sharding of their source. Their replicas are compared later.
        self._sources: list[tuple[list[str], Sharding]] = []
        self._plans = [*self._planned()]

    def _number_of(self, sharding: Sharding) -> int:
        """Return the number of a sharding; a new one gets the next number."""
        number = self._known.setdefault(sharding, len(self._known))
        if number == len(self._shardings):
            self._shardings.append(sharding)
        return number

    def _planned(self) -> Iterator[_Plan]:
        """Yield the plans of all tensors, one for all names that every rank states alike."""
        groups: dict[Any, list[str]] = {}
        for name in sorted(self._rows):
            stated_sides = [tuple(side) for side in self._rows[name].stated]
            groups.setdefault((*stated_sides, *self._described(name)), []).append(name)
        for names in groups.values():
            plan = self._plan(names)
            if plan is not None:
                yield plan

    def _described(self, name: str) -> list[tuple[int, int, int]]:
        """Return how ranks have a tensor on a mesh, or plain: the numbers of the description, the side and the
        sharding. Empty if no rank has it so."""
        if name not in self._number:
            return []
        numbers = []
        for number, (description, _) in enumerate(self._others):
            for side, shardings in enumerate((description.source, description.target)):
                if name in shardings:
                    numbers.append((number, side, self._number_of(shardings[name])))
        return numbers

    def _stated(self, name: str) -> Iterator[tuple[Description, list[int]]]:
        """Yield what ranks say of this tensor, as a `Description` of it alone with the ranks that gave it: first those
        that have it in pieces, then those that have it on a mesh or plain."""
        for side, rank_and_sharding in enumerate(self._rows[name].stated):
            for rank, number in rank_and_sharding:
                own = {name: self._shardings[number]}
                yield (Description({}, own) if side else Description(own, {})), [rank]
        if name in self._number:
            for description, ranks in self._others:
                source, target = ({name: side[name]} if name in side else {} for side in description[:2])
                yield Description(source, target), ranks

    def _plan(self, names: list[str]) -> _Plan | None:
        """Plan tensors that every rank states alike. Only the first one is looked at.

        If something is wrong with it, the others are planned one by one, so that each problem names its tensor.
        """
        name = names[0]
        sides, problems = self._sides(name)
        source, target = sides
        if not problems and (source is None or target is None):
            # Index 0 is the source: a name without a source is one that the target alone has.
            self.alone[source is None].extend(names)
            self._compare_later(names, source)
            if self._strict:
                self.problems += [Problem(1, 0, n, text) for n in names for text in differences(n, source, target)]
            return None
        self._both += 1
        if not problems and source is not None and target is not None:
            problems = [Problem(1, 0, name, text) for text in differences(name, source, target)]
        if not problems and source is not None and target is not None:
            tensor = Tensor(name, source, target)
            pieces = Pieced(tuple(source.regions.shape), self._end(source), self._end(target), self._gone)
            text = uncovered_text(tensor, pieces)
            if text is None:
                self._both += len(names) - 1
                self._compare_later(names, source)
                return self._plan_of(names, tensor, pieces)
            problems = [Problem(2, 0, name, text)]
        self.problems += problems
        # Each side by itself is right, so that the values of the source can be compared.
        if problems[0].stage > 0:
            self._compare_later([name], source)
        for other in names[1:]:
            self._plan([other])
        return None

    def _compare_later(self, names: list[str], source: Sharding | None) -> None:
        """Note that replicas of these sources are to be compared."""
        if source is not None:
            self._sources.append((names, source))

    def _sides(self, name: str) -> tuple[list[Sharding | None], list[Problem]]:
        """Put together what ranks state of a tensor: the sharding of each side, None if nobody has it there; and what
        is wrong with a side by itself."""
        stated = sorted(self._stated(name), key=lambda description_and_ranks: description_and_ranks[1][0])
        sides: list[Sharding | None] = []
        problems: list[Problem] = []
        for side in SIDES:
            sides.append(join_side(stated, side, problems, self._gone).get(name))
        return sides, problems

    def _plan_of(self, names: list[str], tensor: Tensor, pieces: Pieced) -> _Plan | None:
        """Return the plan of tensors without problems; None if ranks that are gone want some of them, or alone have
        some of them, which is an error on all ranks later."""
        source, target = tensor.sides
        is_lost = not self._gone.isdisjoint(source.ranks) and pieces.missing() is not None
        is_wanted = not self._gone.isdisjoint(target.ranks)
        self._lost += names if is_lost else []
        self._wanted += names if is_wanted else []
        if is_lost or is_wanted:  # there may be a cell without a holder, which can't be planned
            return None
        # Planners don't know one another's tensors. So the key comes from the shardings, and is equal for equal ones.
        digest = hashlib.blake2b(repr(tensor.sides).encode(), digest_size=16).digest()
        low, high = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
        return _Plan(names, tensor, pieces, numbers_of(tensor, pieces), (low, high))

    def _end(self, sharding: Sharding) -> End:
        """Return the boxes of all ranks for a sharding; made once for each."""
        if sharding not in self._ends:
            self._ends[sharding] = end_of(sharding)
        return self._ends[sharding]

    def answers(self, ranks: Sequence[int]) -> list[bytes]:
        """Write the answer to each of these ranks, in their order, and note which digests are asked for, for `compare`.

        An answer has the keys of all names that are planned here; the boxes whose digests are asked for; and for each
        plan in which the rank has a part, its routes and its names.
        """
        keys = [key_of(name) for plan in self._plans for name in plan.names]
        plans: dict[int, list[int]] = {rank: [] for rank in ranks}
        types: dict[tuple[str, str], int] = {}
        for plan in self._plans:
            source, target = plan.tensor.sides
            kinds = [types.setdefault((side.dtype, side.device), len(types)) for side in (source, target)]
            dims = len(source.regions.shape)
            head = [*plan.key, *kinds, dims, len(plan.numbers), *itertools.chain(*plan.numbers)]
            positions = self._positions(plan.names)
            for rank in sorted({*source.ranks, *target.ranks} - self._gone):
                routes, named = [*plan.numbers_for(rank)], positions.get(rank, positions[None])
                plans[rank] += [len(routes), len(named) // 2, *head, *routes, *named]
        asked: dict[int, list[int]] = {rank: [] for rank in ranks}
        for names, source in self._sources:
            pieces, replicas = dict(zip(source.ranks, source.pieces)), _replicas(source)
            for name in names if replicas else ():
                for rank, side, place in self._rows[name].places:
                    if rank in replicas and not side:
                        asked[rank] += [place, len(replicas[rank]), *replicas[rank]]
                        boxes = [(name, pieces[rank][number]) for number in replicas[rank]]
                        self._asked.setdefault(rank, []).extend(boxes)
        return [packed([*types], [len(keys), *keys, len(asked[n]), *asked[n], *plans[n]]) for n in ranks]

    def _positions(self, names: Sequence[str]) -> dict[int | None, list[int]]:
        """Return for each rank how an answer to it refers to these names: for each a side and a position, of the
        statement that the rank sent."""
        positions: dict[int | None, list[int]] = {None: []}
        for name in names:
            seen = set()
            for rank, side, place in self._rows[name].places:
                if rank not in seen:
                    seen.add(rank)
                    positions.setdefault(rank, []).extend((side, place))
            if name in self._number:
                positions[None] += [_OTHERS, self._number[name]]
        return positions

    def compare(self, digests: Mapping[int, bytes]) -> None:
        """Compare the replicas of this planner's sources, and add those that differ to `problems`. Comes after
        `answers`."""
        by_name: dict[str, dict[int, list[tuple[Box, str]]]] = {}
        for rank, asked in self._asked.items():
            values = unpacked(digests[rank])[0] if digests[rank] else []
            for (name, box), value in zip(asked, values):
                by_name.setdefault(name, {}).setdefault(rank, []).append((box, value))
        shardings = {name: source for names, source in self._sources for name in names}
        plain = {name for name, sharding in shardings.items() if not sharding.pieces}
        self.problems += replica_problems([(_only(each, plain, True), ranks) for each, ranks in self._others])
        for name, said in sorted(by_name.items()):
            self.problems += replica_problems(
                [(Description({name: shardings[name]}, {}, None, {name: said[rank]}), [rank]) for rank in sorted(said)]
            )

    def verdict(self) -> Data:
        """Return what this planner tells all ranks, as JSON takes it. Comes after `compare`. `Verdict` says what the
        values are; names on meshes go by number, since all ranks know them."""
        # Problems of later stages often only follow from those of an earlier one.
        stage = min([problem.stage for problem in self.problems], default=0)
        problems = sorted([problem for problem in self.problems if problem.stage == stage], key=lambda each: each[:3])
        tensors = [plan.tensor for plan in self._plans]
        names = [name for plan in self._plans for name in plan.names]
        return {
            "problems": problems[:SHOWN],
            "count": len(problems),
            "wanted": self._wanted,
            "lost": self._lost,
            "others": sorted([self._number[name] for name in self._rows if name in self._number]),
            "alone": [[], []] if self._strict else self.alone,
            "both": self._both,
            "tensors": len(names),
            "ranks": [sorted({rank for tensor in tensors for rank in getattr(tensor, side).ranks}) for side in SIDES],
            "first": min([(min(plan.names), plan.tensor.source.device) for plan in self._plans], default=None),
        }


def _replicas(source: Sharding) -> dict[int, list[int]]:
    """Return for each rank the numbers of its pieces whose boxes other pieces have, too."""
    counts = Counter(box for boxes in source.pieces for box in boxes if box.elements)
    if not counts or max(counts.values()) == 1:
        return {}
    numbers_by_rank = {
        rank: [number for number, box in enumerate(boxes) if counts[box] > 1]
        for rank, boxes in zip(source.ranks, source.pieces)
    }
    return {rank: numbers for rank, numbers in numbers_by_rank.items() if numbers}


def _numbers_of_routes(routes: Routes | None) -> Iterator[int]:
    """Yield routes as integers; None is a rank that does nothing. `_routes` reads them."""
    if routes is None:
        yield from (0, 0, 0)
        return
    yield from (len(routes.sends), len(routes.receives), len(routes.kept))
    for share in (*routes.sends, *routes.receives):
        yield from (share.peer, *share.box.start, *share.box.length, share.first, share.last)
    for box in routes.kept:
        yield from (*box.start, *box.length)


# --- What a rank makes of the answers ---


class _Answer(NamedTuple):
    """What a planner answers a rank for tensors with equal shardings.

    Attributes:
        names: of the tensors.
        key: as of `_Plan`.
        kinds: dtype and device type of the source, and those of the target.
        numbers: the pairs of piece numbers between which elements may move.
        routes: what this rank does, for each of these pairs.
    """

    names: list[str]
    key: tuple[int, int]
    kinds: list[tuple[str, str]]
    numbers: list[Numbers]
    routes: list[Routes]


class Answers:
    """The answers of all planners to one rank.

    Args:
        messages: for each planner its answer.
        stated: for each planner and side, the names in this rank's statement.
        others: as `names_of_others` returns them.

    Attributes:
        keys: the hashes of the names of all tensors in pieces that some rank moves, ascending.
    """

    def __init__(
        self, messages: Sequence[bytes], stated: Sequence[Sequence[Sequence[str]]], others: Sequence[str]
    ) -> None:
        self._routes: dict[tuple[int, int], tuple[list[Numbers], list[Routes]]] = {}
        self._answers: list[_Answer] = []
        self._asked: list[list[tuple[str, int]]] = []  # by planner, names and numbers of pieces of the source
        keys: list[int] = []
        for message, names in zip(messages, stated):
            types, numbers = unpacked(message)
            at = 1 + numbers[0]
            keys += numbers[1:at]
            begin, end = at + 1, at + 1 + numbers[at]
            self._asked.append([*_asked(numbers[begin:end], names[0])])
            self._answers += self._read(types, numbers, end, (*names, others))
        self.keys = array("q", sorted(keys))

    def _read(
        self, types: Sequence[Any], numbers: list[int], at: int, called: Sequence[Sequence[str]]
    ) -> Iterator[_Answer]:
        """Read a planner's answers."""
        while at < len(numbers):
            size, name_count, low, high, *kinds, dims, pair_count = numbers[at : at + 8]
            begin = at + 8
            at = begin + 2 * pair_count
            key = low, high
            if key not in self._routes:  # another planner answered the same for tensors with these shardings
                pairs = [(numbers[n], numbers[n + 1]) for n in range(begin, at, 2)]
                self._routes[key] = pairs, [*_routes(numbers, at, pair_count, dims)]
            at += size
            names = [called[numbers[n]][numbers[n + 1]] for n in range(at, at + 2 * name_count, 2)]
            at += 2 * name_count
            yield _Answer(names, key, [tuple(types[kind]) for kind in kinds], *self._routes[key])

    def digests(self, digest: Callable[[str, int], str]) -> list[bytes]:
        """Compute the digests for which planners ask. Returns a message for each planner; empty if it asks for none."""
        return [packed([digest(*piece) for piece in asked], []) if asked else b"" for asked in self._asked]

    def moves(
        self, own: Sequence[Mapping[str, Sharding]], others: Sequence[Mapping[str, Sharding]], rank: int
    ) -> Iterator[tuple[Tensor, list[tuple[Numbers, PlannedMove]]]]:
        """Yield each tensor of which this rank has a part, with its moves: pairs of piece numbers and a move."""
        known: dict[tuple[int, int], list[tuple[Numbers, PlannedMove]]] = {}
        for answer in self._answers:
            first = answer.names[0]
            sides = [
                own[n].get(first) or others[n].get(first) or self._elsewhere(first, kind, own, others)
                for n, kind in enumerate(answer.kinds)
            ]
            if answer.key not in known:
                held, wanted = (_boxes_of(side, rank) for side in sides)
                itemsize = Tensor(first, *sides).wire.itemsize
                known[answer.key] = [
                    ((source, target), PlannedMove(_at(held, source), _at(wanted, target), routes, itemsize))
                    for (source, target), routes in zip(answer.numbers, answer.routes)
                ]
            for name in answer.names:
                yield Tensor(name, *sides), known[answer.key]

    @staticmethod
    def _elsewhere(
        name: str,
        kind: tuple[str, str],
        own: Sequence[Mapping[str, Sharding]],
        others: Sequence[Mapping[str, Sharding]],
    ) -> Sharding:
        """Return the sharding of a side of which this rank has no part. Only the planner knows its boxes, so it is
        marked as being in pieces, with none listed."""
        shape = next(tuple(side[name].regions.shape) for side in (*own, *others) if name in side)
        return replicated_sharding(kind[0], shape, (), kind[1])._replace(pieces=((),))


def _asked(numbers: Sequence[int], names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Read for which pieces a planner asks: yields a name and the number of a piece."""
    at = 0
    while at < len(numbers):
        place, count = numbers[at : at + 2]
        at += 2 + count
        for number in numbers[at - count : at]:
            yield names[place], number


def _routes(numbers: Sequence[int], at: int, pairs: int, dims: int) -> Iterator[Routes]:
    """Read the routes of `pairs` pairs of piece numbers, of a tensor with `dims` dims, from position `at` on."""
    size = 2 * dims
    for _ in range(pairs):
        sends, receives, kept = numbers[at : at + 3]
        at += 3
        shares = []
        for _ in range(sends + receives):
            box = Box(tuple(numbers[at + 1 : at + 1 + dims]), tuple(numbers[at + 1 + dims : at + 1 + size]))
            shares.append(Share(numbers[at], box, numbers[at + 1 + size], numbers[at + 2 + size]))
            at += 3 + size
        yield Routes(shares[:sends], shares[sends:], _boxes(numbers, at, kept, dims))
        at += size * kept


def _boxes_of(sharding: Sharding, rank: int) -> Sequence[Box]:
    """Return the boxes that a rank has of a tensor with this sharding."""
    if sharding.pieces:
        return sharding.pieces[0]
    side = Side(sharding.regions, Ranks.of(sharding.ranks, sharding.regions.sizes))
    coordinate = side.ranks.coordinate(rank)
    return () if coordinate is None else (side.box(coordinate),)


def _at(boxes: Sequence[Box], number: int) -> Box | None:
    """Return the box of the piece with this number; None if the rank has no such piece."""
    return boxes[number] if number < len(boxes) else None


def is_among(keys: array[int], name: str) -> bool:
    """True if the key of a name is among these keys, which are sorted. Of another name it is True if both hash to one
    key."""
    key = key_of(name)
    place = bisect_left(keys, key)
    return place < len(keys) and keys[place] == key


# --- What all ranks hear of all planners ---


class Verdict(NamedTuple):
    """What all planners say together, the same on all ranks.

    Attributes:
        problems: of the first stage that has some; the first few of all planners.
        many: how many problems that stage has.
        wanted: the names of tensors whose targets are on ranks that are gone.
        lost: the names of tensors of which only ranks that are gone have some part.
        alone: for each side the names that only this side has; empty if that is a problem (strict).
        both: how many names both sides have, counting those without a problem with one side by itself.
        others: the names that are in pieces on one side, and on a mesh or plain on the other.
        tensors: how many tensors in pieces are moved.
        ranks: for each side the ranks of these tensors.
        first: the name and the device type of the first of these tensors by name; None if there is none.
    """

    problems: list[Problem]
    many: int
    wanted: list[str]
    lost: list[str]
    alone: tuple[list[str], list[str]]
    others: set[str]
    both: int
    tensors: int
    ranks: tuple[set[int], set[int]]
    first: tuple[str, str] | None

    @staticmethod
    def of(said: Iterable[Data], others: Sequence[str]) -> Verdict:
        """Put together what all ranks said after planning."""
        verdicts = [data for data in said if "problems" in data]
        stages = [(Problem(*problems[0]).stage, data) for data in verdicts if (problems := data["problems"])]
        stage = min([stage for stage, _ in stages], default=0)
        in_stage = [data for of_data, data in stages if of_data == stage]
        problems = sorted([Problem(*p) for data in in_stage for p in data["problems"]], key=lambda p: p[:3])
        source, target = ([name for data in verdicts for name in data["alone"][side]] for side in range(2))
        senders, receivers = ({rank for data in verdicts for rank in data["ranks"][side]} for side in range(2))
        return Verdict(
            problems=problems[:SHOWN],
            many=sum([data["count"] for data in in_stage]),
            wanted=[name for data in verdicts for name in data["wanted"]],
            lost=[name for data in verdicts for name in data["lost"]],
            alone=(source, target),
            others={others[number] for data in verdicts for number in data["others"]},
            both=sum([data["both"] for data in verdicts]),
            tensors=sum([data["tensors"] for data in verdicts]),
            ranks=(senders, receivers),
            first=min([(data["first"][0], data["first"][1]) for data in verdicts if data["first"]], default=None),
        )


class Others(NamedTuple):
    """The tensors of which no rank has pieces, as all ranks agree on them.

    Attributes:
        tensors: in order of name.
        left_out: for "source" and "target" the names that only this side has; also of tensors in pieces.
        shardings: for each side, those of all tensors that aren't in pieces there, by name.
    """

    tensors: list[Tensor]
    left_out: dict[str, tuple[str, ...]]
    shardings: list[dict[str, Sharding]]


def agreed_beside(
    verdict: Verdict, others: Mapping[int, Description], gone: frozenset[int] = frozenset(), strict: bool = True
) -> Others:
    """Compare the tensors of which no rank has pieces, and raise what planners found wrong with the others.

    It raises the errors that `agreed` would if each rank knew all pieces.
    """
    mixed, alone = (
        [(_only(each, verdict.others, is_in), ranks) for each, ranks in distinct_descriptions(others)]
        for is_in in (True, False)
    )

    def raise_stage(stage: int, own: Sequence[Problem], why: str | None = None) -> None:
        """Raise the problems of a stage, if there are some here (`own`) or in the verdict."""
        of_planners = [problem for problem in verdict.problems if problem.stage == stage]
        texts = [problem.text for problem in sorted([*own, *of_planners], key=lambda problem: problem[:3])]
        more = {} if why is None else {"why": why}
        raise_if_any(texts, len(own) + (verdict.many if of_planners else 0), **more)

    problems: list[Problem] = []
    sides = [join_side(alone, side, problems, gone) for side in SIDES]
    raise_stage(0, problems + replica_problems(alone, problems))
    both = sides[0].keys() & sides[1].keys()
    left_out = [sorted({*side} - both) + names for side, names in zip(sides, verdict.alone)]
    if not strict and not both and not verdict.both:
        lone = sorted([(name, sides) for names, sides in zip(left_out, (SIDES, SIDES[::-1])) for name in names])
        raise_if_any(["they have no name in common", *itertools.starmap(lacking, lone)])
    names = sorted({*sides[0], *sides[1]} if strict else both)
    raise_stage(1, [Problem(1, 0, n, text) for n in names for text in differences(n, *[side.get(n) for side in sides])])
    raise_stage(2, [], UNCOVERED)
    all_shardings = [side | join_side(mixed, name, [], gone) for side, name in zip(sides, SIDES)]
    tensors = [Tensor(name, *[side[name] for side in sides]) for name in sorted(both)]
    return Others(tensors, {side: tuple(sorted(names)) for side, names in zip(SIDES, left_out)}, all_shardings)


def _only(description: Description, names: set[str], is_in: bool) -> Description:
    """Return a description with only the tensors whose names are in `names`; without these, if `is_in` is False."""
    source, target = (
        {n: sharding for n, sharding in side.items() if (n in names) == is_in} for side in description[:2]
    )
    digests = {name: boxes for name, boxes in (description.digests or {}).items() if (name in names) == is_in}
    return description._replace(source=source, target=target, digests=digests)


def ask_planners(
    team: Team,
    own: Description,
    others: Mapping[int, Description],
    gone: frozenset[int],
    strict: bool,
    digest: Callable[[str, int], str],
    enter: Callable[[str, bool], object],
) -> tuple[Answers, Data]:
    """Plan the tensors that hash to this rank, and ask all planners for this rank's part. Collective over the team,
    each rank of which is a planner."""
    messages, names = statements([in_pieces(shardings) for shardings in (own.source, own.target)], len(team.ranks))
    enter("telling planners of pieces", True)
    came = dict(zip(team.ranks, team.swap(messages)))
    enter("planning pieces", False)
    planner = Planner(came, others, gone, strict)
    told = planner.answers(team.ranks)
    enter("hearing from planners", True)
    answers = Answers(team.swap(told), names, names_of_others(others))
    # With tens of thousands of tensors these are long, and reading replicas takes a while.
    del came, messages, told
    enter("reading replicas of pieces", False)
    problem, seen = None, [b""] * len(team.ranks)
    try:
        seen = answers.digests(digest)
    except Exception as error:  # a tensor can't be read; raised on all ranks later, since they wait for this one now
        problem = str(error) if isinstance(error, (TypeError, ValueError, RuntimeError)) else repr(error)
    enter("comparing replicas of pieces", True)
    planner.compare(dict(zip(team.ranks, team.swap(seen))))
    return answers, {**planner.verdict(), "problem": problem}
