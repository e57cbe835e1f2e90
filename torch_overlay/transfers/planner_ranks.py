"""Tensors in pieces, each planned by one rank: no rank reads the pieces of all others.

A mixture of experts has tens of thousands of tensors, and each trainer gives its rows of every one. So each name has a
planner, a rank that a hash of the name says. All ranks that have tensors are planners. Start at `ask_planners`:

1. Each rank sends each planner a statement: which boxes it gives and wants of the planner's tensors.
2. The `Planner` compares what the ranks of a tensor state, plans who sends what to whom, and answers each rank with its
   own part. Tensors that lie alike on both sides are planned once.
3. It asks for digests of the boxes that several ranks give, and compares them.
4. Its verdict, which goes to all ranks by the store, is what is wrong, and what there is in all.

A side on a mesh, or of plain tensors, is known to all ranks from their descriptions; a planner takes it from there. A
message is names and types as JSON, and one flat array of whole numbers: reading it runs nothing. All but `ask_planners`
is free of effects, so that a test can have many ranks in one process.
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

from ..distributed.tensor._planner.regions import Box
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
from .hops import end_of
from .replicas import replica_problems
from .sharding import Sharding, replicated_sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ._planner.piece_moves import End
    from .descriptions import Data
    from .team import Team

# Pieces of all ranks: up to here each rank describes its own to all, in one meeting and without a control group. On 8
# ranks both ways took 60 ms of CPU at 1,000 pieces; at 4,000 asking planners took 75 ms and the other way 270.
LISTED = 1024
_OTHERS = len(SIDES)  # in place of a side: the number is that of a name that is on a mesh, or plain
Numbers = tuple[int, int]  # of a piece of the source and of one of the target


def planner_of(name: str, planners: int) -> int:
    """Which of so many planners plans a tensor."""
    return zlib.crc32(_encoded(name)) % planners


def key_of(name: str) -> int:
    """64 bits by which ranks that don't have a tensor know that there is one."""
    return int.from_bytes(hashlib.blake2b(_encoded(name), digest_size=8).digest(), "little", signed=True)


def _encoded(name: str) -> bytes:
    return name.encode(errors="surrogatepass")


def packed(words: Any, numbers: Sequence[int]) -> bytes:
    """A message: what JSON takes, and whole numbers of 64 bits."""
    head = json.dumps(words).encode()
    return len(head).to_bytes(8, "little") + head + array("q", numbers).tobytes()


def unpacked(message: bytes) -> tuple[Any, list[int]]:
    """What `packed` was given."""
    end = 8 + int.from_bytes(message[:8], "little")
    numbers = array("q")
    numbers.frombytes(message[end:])
    return json.loads(message[8:end]), numbers.tolist()


def in_pieces(shardings: Mapping[str, Sharding]) -> dict[str, Sharding]:
    """The tensors that are in pieces."""
    return {name: sharding for name, sharding in shardings.items() if sharding.pieces}


def without_pieces(said: Mapping[int, Description]) -> dict[int, Description]:
    """What ranks said of tensors on meshes, and of plain ones; of those who said the same, one object."""
    found: dict[int, Description] = {}
    for description, ranks in distinct_descriptions(said):
        sides = [
            {name: sharding for name, sharding in getattr(description, side).items() if not sharding.pieces}
            for side in SIDES
        ]
        digests = {name: seen for name, seen in (description.digests or {}).items() if name in sides[0]}
        found |= dict.fromkeys(ranks, description._replace(source=sides[0], target=sides[1], digests=digests))
    return found


def names_of_others(others: Mapping[int, Description]) -> list[str]:
    """The names that some rank has on a mesh, or plain, ascending."""
    return sorted({name for each, _ in distinct_descriptions(others) for side in SIDES for name in getattr(each, side)})


# --- What a rank states to the planner of a tensor ---


def statements(sides: Sequence[Mapping[str, Sharding]], planners: int) -> tuple[list[bytes], list[list[list[str]]]]:
    """The statement for each planner; and, by planner and side, the names in it, to which answers refer by number.

    Args:
        sides: the tensors of this rank that are in pieces.
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
    made = []
    for known, called, lies in zip(kinds, names, chosen):
        types: dict[tuple[str, str], int] = {}
        numbers: list[int] = []
        for sharding in known:
            boxes = sharding.pieces[0]
            numbers += [types.setdefault((sharding.dtype, sharding.device), len(types)), len(sharding.regions.shape)]
            numbers += [len(boxes), *sharding.regions.shape]
            for box in boxes:
                numbers += [*box.start, *box.length]
        numbers += itertools.chain(*lies)
        made.append(packed([[*types], len(known), called], numbers) if known else b"")
    return made, names


def stated(message: bytes) -> list[list[tuple[str, Sharding]]]:
    """By side, the names in a statement, each with how it lies."""
    if not message:
        return [[], []]
    (types, many, names), numbers = unpacked(message)
    at, kinds = 0, []
    for _ in range(many):
        kind, dims, boxes = numbers[at : at + 3]
        at += 3
        shape = tuple(numbers[at : at + dims])
        at += dims
        pieces = _boxes(numbers, at, boxes, dims)
        at += 2 * dims * boxes
        dtype, device = types[kind]
        kinds.append(replicated_sharding(dtype, shape, (), device)._replace(pieces=(tuple(pieces),)))
    found = []
    for some in names:
        found.append([*zip(some, map(kinds.__getitem__, numbers[at : at + len(some)]))])
        at += len(some)
    return found


def _boxes(numbers: Sequence[int], at: int, many: int, dims: int) -> list[Box]:
    """Boxes that stand one after the other, from a place on."""
    begins = [at + 2 * dims * number for number in range(many)]
    return [Box(tuple(numbers[n : n + dims]), tuple(numbers[n + dims : n + 2 * dims])) for n in begins]


# --- Plans ---


def numbers_of(tensor: Tensor, pieces: Pieced) -> list[Numbers]:
    """Of the pieces between which something goes, or stays; 0 of a side that isn't in pieces."""
    if not (tensor.source.pieces and tensor.target.pieces):
        ones, others = (range(max(map(len, side.pieces), default=1)) for side in tensor.sides)
        return [*itertools.product(ones, others)]
    return sorted({(0, 0), *pieces.pairs(zip(tensor.target.ranks, tensor.target.pieces))})


class _Row(NamedTuple):
    """How one tensor lies, as ranks state it: by side, (rank, number of its sharding)."""

    lies: tuple[list[Numbers], list[Numbers]]
    places: list[tuple[int, int, int]]  # for each rank that states it: the rank, the side, the number in the statement


class _Plan(NamedTuple):
    """Tensors that lie alike, planned as one.

    Attributes:
        key: equal for equal shardings of both sides, whichever rank plans them: these tensors travel together.
    """

    names: list[str]
    tensor: Tensor
    pieces: Pieced
    numbers: list[Numbers]
    key: tuple[int, int]

    def numbers_for(self, rank: int) -> Iterator[int]:
        """What a rank does, as whole numbers."""
        found = self.pieces.of(rank)
        for pair in self.numbers:
            yield from _numbers_of_routes(found.get(pair))


class Planner:
    """The tensors in pieces that one rank plans.

    Args:
        messages: by rank, its statement.
        others: what each rank said of tensors that aren't in pieces.
        gone: ranks that send nothing.
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
        self._known: dict[Sharding, int] = {}
        self._shardings: list[Sharding] = []
        self._ends: dict[Sharding, End] = {}
        self._rows: dict[str, _Row] = {}
        for rank in sorted(messages):
            for side, some in enumerate(stated(messages[rank])):
                for place, (name, sharding) in enumerate(some):
                    row = self._rows.get(name)
                    if row is None:
                        row = self._rows[name] = _Row(([], []), [])
                    row.lies[side].append((rank, self._called(sharding)))
                    row.places.append((rank, side, place))
        self.problems: list[Problem] = []
        self._both = 0
        self.alone: tuple[list[str], list[str]] = [], []
        self._wanted: list[str] = []
        self._lost: list[str] = []
        self._asked: dict[int, list[tuple[str, Box]]] = {}
        self._sources: list[tuple[list[str], Sharding]] = []  # names that lie alike, whose replicas are to be compared
        self._plans = [*self._planned()]

    def _called(self, sharding: Sharding) -> int:
        number = self._known.setdefault(sharding, len(self._known))
        if number == len(self._shardings):
            self._shardings.append(sharding)
        return number

    def _planned(self) -> Iterator[_Plan]:
        groups: dict[Any, list[str]] = {}
        for name in sorted(self._rows):
            lies = [tuple(side) for side in self._rows[name].lies]
            groups.setdefault((*lies, *self._lie_elsewhere(name)), []).append(name)
        for names in groups.values():
            plan = self._plan(names)
            if plan is not None:
                yield plan

    def _lie_elsewhere(self, name: str) -> list[tuple[int, int, int]]:
        """How it lies on meshes, or as plain tensors, in numbers."""
        if name not in self._number:
            return []
        found = []
        for number, (description, _) in enumerate(self._others):
            for side, shardings in enumerate((description.source, description.target)):
                if name in shardings:
                    found.append((number, side, self._called(shardings[name])))
        return found

    def _stated(self, name: str) -> Iterator[tuple[Description, list[int]]]:
        """Descriptions of this tensor alone, with the ranks that say so."""
        for side, lies in enumerate(self._rows[name].lies):
            for rank, number in lies:
                own = {name: self._shardings[number]}
                yield (Description({}, own) if side else Description(own, {})), [rank]
        if name in self._number:
            for description, ranks in self._others:
                source, target = ({n: some[n] for n in (name,) if n in some} for some in description[:2])
                yield Description(source, target), ranks

    def _plan(self, names: list[str]) -> _Plan | None:
        """The plan of tensors that lie alike, after a look at the first one; None if something is wrong with them, or
        only one side has them."""
        name = names[0]
        sides, problems = self._sides(name)
        source, target = sides
        if not problems and (source is None or target is None):
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
                return self._of(names, tensor, pieces)
            problems = [Problem(2, 0, name, text)]
        self.problems += problems
        if problems[0].stage > 0:
            self._compare_later([name], source)
        for other in names[1:]:  # in words of its own
            self._plan([other])
        return None

    def _compare_later(self, names: list[str], source: Sharding | None) -> None:
        if source is not None:
            self._sources.append((names, source))

    def _sides(self, name: str) -> tuple[list[Sharding | None], list[Problem]]:
        """How a tensor lies on each side, as all ranks state it together, and what is wrong with a side."""
        stated = sorted(self._stated(name), key=lambda each: each[1][0])
        sides: list[Sharding | None] = []
        problems: list[Problem] = []
        for side in SIDES:
            sides.append(join_side(stated, side, problems, self._gone).get(name))
        return sides, problems

    def _of(self, names: list[str], tensor: Tensor, pieces: Pieced) -> _Plan | None:
        source, target = tensor.sides
        is_lost = not self._gone.isdisjoint(source.ranks) and pieces.missing() is not None
        is_wanted = not self._gone.isdisjoint(target.ranks)
        self._lost += names if is_lost else []
        self._wanted += names if is_wanted else []
        if is_lost or is_wanted:  # an error on all ranks; nobody may be left to send a part
            return None
        digest = hashlib.blake2b(repr(tensor.sides).encode(), digest_size=16).digest()
        one, two = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
        return _Plan(names, tensor, pieces, numbers_of(tensor, pieces), (one, two))

    def _end(self, sharding: Sharding) -> End:
        if sharding not in self._ends:
            self._ends[sharding] = end_of(sharding)
        return self._ends[sharding]

    def answers(self, ranks: Sequence[int]) -> list[bytes]:
        """What each of these ranks has to do with the tensors of this planner."""
        keys = [key_of(name) for plan in self._plans for name in plan.names]
        plans: dict[int, list[int]] = {rank: [] for rank in ranks}
        types: dict[tuple[str, str], int] = {}
        for plan in self._plans:
            source, target = plan.tensor.sides
            kinds = [types.setdefault((side.dtype, side.device), len(types)) for side in (source, target)]
            dims = len(source.regions.shape)
            head = [*plan.key, *kinds, dims, len(plan.numbers), *itertools.chain(*plan.numbers)]
            where = self._where(plan.names)
            for rank in sorted({*source.ranks, *target.ranks} - self._gone):
                routes, named = [*plan.numbers_for(rank)], where.get(rank, where[None])
                plans[rank] += [len(routes), len(named) // 2, *head, *routes, *named]
        asked: dict[int, list[int]] = {rank: [] for rank in ranks}
        for names, source in self._sources:
            held, replicas = dict(zip(source.ranks, source.pieces)), _replicas(source)
            for name in names if replicas else ():
                for rank, side, place in self._rows[name].places:
                    if rank in replicas and not side:
                        asked[rank] += [place, len(replicas[rank]), *replicas[rank]]
                        boxes = [(name, held[rank][number]) for number in replicas[rank]]
                        self._asked.setdefault(rank, []).extend(boxes)
        return [packed([*types], [len(keys), *keys, len(asked[n]), *asked[n], *plans[n]]) for n in ranks]

    def _where(self, names: Sequence[str]) -> dict[int | None, list[int]]:
        """By rank, where each name stands in what it stated, as pairs of a side and a number; for a rank that stated
        none of them, in the names that all know."""
        found: dict[int | None, list[int]] = {None: []}
        for name in names:
            seen = set()
            for rank, side, place in self._rows[name].places:
                if rank not in seen:
                    seen.add(rank)
                    found.setdefault(rank, []).extend((side, place))
            if name in self._number:
                found[None] += [_OTHERS, self._number[name]]
        return found

    def compare(self, digests: Mapping[int, bytes]) -> None:
        """Hear the digests that were asked for, by rank."""
        by_place: dict[str, dict[int, list[tuple[Box, str]]]] = {}
        for rank, asked in self._asked.items():
            seen = unpacked(digests[rank])[0] if digests[rank] else []
            for (name, box), one in zip(asked, seen):
                by_place.setdefault(name, {}).setdefault(rank, []).append((box, one))
        shardings = {name: source for names, source in self._sources for name in names}
        plain = {name for name, sharding in shardings.items() if not sharding.pieces}
        self.problems += replica_problems([(_only(each, plain, True), ranks) for each, ranks in self._others])
        for name, said in sorted(by_place.items()):
            self.problems += replica_problems(
                [(Description({name: shardings[name]}, {}, None, {name: said[rank]}), [rank]) for rank in sorted(said)]
            )

    def verdict(self) -> Data:
        """For all ranks: what is wrong, and what there is."""
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
    """By rank, the numbers of its pieces that stand more than once among all ranks'."""
    many = Counter(box for boxes in source.pieces for box in boxes if box.elements)
    if not many or max(many.values()) == 1:
        return {}
    found = {
        rank: [number for number, box in enumerate(boxes) if many[box] > 1]
        for rank, boxes in zip(source.ranks, source.pieces)
    }
    return {rank: numbers for rank, numbers in found.items() if numbers}


def _numbers_of_routes(routes: Routes | None) -> Iterator[int]:
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
    """What a planner answers for tensors that lie alike.

    Attributes:
        kinds: of the source and of the target: type and device.
        routes: for each pair of numbers.
    """

    names: list[str]
    key: tuple[int, int]
    kinds: list[tuple[str, str]]
    numbers: list[Numbers]
    routes: list[Routes]


class Answers:
    """What all planners answer a rank.

    Args:
        messages: by planner.
        stated: by planner and side, the names in this rank's statement.
        others: the names that aren't in pieces on some rank, ascending.

    Attributes:
        keys: those of all tensors in pieces that are moved, by this rank or by others, ascending.
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
        while at < len(numbers):
            size, many, one, two, *kinds, dims, pairs = numbers[at : at + 8]
            begin = at + 8
            at = begin + 2 * pairs
            if (one, two) not in self._routes:  # what another planner answered of such tensors is the same
                some = [(numbers[n], numbers[n + 1]) for n in range(begin, at, 2)]
                self._routes[one, two] = some, [*_routes(numbers, at, pairs, dims)]
            at += size
            names = [called[numbers[n]][numbers[n + 1]] for n in range(at, at + 2 * many, 2)]
            at += 2 * many
            yield _Answer(names, (one, two), [tuple(types[kind]) for kind in kinds], *self._routes[one, two])

    def digests(self, digest: Callable[[str, int], str]) -> list[bytes]:
        """What each planner asks for.

        Args:
            digest: that of the piece of a source that has this number.
        """
        return [packed([digest(*each) for each in asked], []) if asked else b"" for asked in self._asked]

    def moves(
        self, own: Sequence[Mapping[str, Sharding]], others: Sequence[Mapping[str, Sharding]], rank: int
    ) -> Iterator[tuple[Tensor, list[tuple[Numbers, PlannedMove]]]]:
        """The tensors of which this rank has a part, each with its ways.

        Args:
            own: by side, how its pieces lie.
            others: by side, how what isn't in pieces lies.
        """
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
                    ((one, other), PlannedMove(_at(held, one), _at(wanted, other), routes, itemsize))
                    for (one, other), routes in zip(answer.numbers, answer.routes)
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
        """How a side lies of which this rank has no part: pieces, whose boxes only the planner knows."""
        shape = next(tuple(some[name].regions.shape) for some in (*own, *others) if name in some)
        return replicated_sharding(kind[0], shape, (), kind[1])._replace(pieces=((),))


def _asked(numbers: Sequence[int], names: Sequence[str]) -> Iterator[tuple[str, int]]:
    at = 0
    while at < len(numbers):
        place, many = numbers[at : at + 2]
        at += 2 + many
        for number in numbers[at - many : at]:
            yield names[place], number


def _routes(numbers: Sequence[int], at: int, pairs: int, dims: int) -> Iterator[Routes]:
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
    """What a rank has of a sharding: of pieces, its own are all that is there."""
    if sharding.pieces:
        return sharding.pieces[0]
    side = Side(sharding.regions, Ranks.of(sharding.ranks, sharding.regions.sizes))
    coordinate = side.ranks.coordinate(rank)
    return () if coordinate is None else (side.box(coordinate),)


def _at(boxes: Sequence[Box], number: int) -> Box | None:
    return boxes[number] if number < len(boxes) else None


def is_among(keys: array[int], name: str) -> bool:
    """Whether a tensor has one of these keys, which are ascending."""
    key = key_of(name)
    place = bisect_left(keys, key)
    return place < len(keys) and keys[place] == key


# --- What all ranks hear of all planners ---


class Verdict(NamedTuple):
    """What the planners say together, the same on all ranks.

    Attributes:
        problems: the first few of the first stage that has some, of all planners.
        many: how many that stage has.
        wanted, lost: names of tensors whose targets are on ranks that are gone, and of which nobody else has a part.
        alone: by side, the names that only it has; not strict.
        both: how many names both sides have, if there is no problem with a side by itself.
        others: the names that are in pieces on one side, and on a mesh or plain on the other.
        tensors: how many are in pieces and moved.
        ranks: by side, those of these tensors.
        first: the first one's name and type of device.
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
        """Of what planners say; `others` are the names that aren't in pieces on some rank."""
        every = [each for each in said if "problems" in each]
        stages = [(Problem(*problems[0]).stage, each) for each in every if (problems := each["problems"])]
        stage = min([stage for stage, _ in stages], default=0)
        some = [each for at, each in stages if at == stage]
        problems = sorted([Problem(*problem) for each in some for problem in each["problems"]], key=lambda p: p[:3])
        source, target = ([name for each in every for name in each["alone"][side]] for side in range(2))
        senders, receivers = ({rank for each in every for rank in each["ranks"][side]} for side in range(2))
        return Verdict(
            problems=problems[:SHOWN],
            many=sum([each["count"] for each in some]),
            wanted=[name for each in every for name in each["wanted"]],
            lost=[name for each in every for name in each["lost"]],
            alone=(source, target),
            others={others[number] for each in every for number in each["others"]},
            both=sum([each["both"] for each in every]),
            tensors=sum([each["tensors"] for each in every]),
            ranks=(senders, receivers),
            first=min([(each["first"][0], each["first"][1]) for each in every if each["first"]], default=None),
        )


class Others(NamedTuple):
    """The tensors of which no rank has pieces, as all ranks agree on them beside those of the planners.

    Attributes:
        tensors: in order of name.
        left_out: by side, the names that only it has, those in pieces among them.
        shardings: by side, how all lies that isn't in pieces.
    """

    tensors: list[Tensor]
    left_out: dict[str, tuple[str, ...]]
    shardings: list[dict[str, Sharding]]


def agreed_beside(
    verdict: Verdict, others: Mapping[int, Description], gone: frozenset[int] = frozenset(), strict: bool = True
) -> Others:
    """What all ranks agree on, after the planners; as `agreed` does where each rank knows all pieces.

    Raises:
        ValueError: something doesn't fit; names the tensors. The same on all ranks.
    """
    mixed, alone = (
        [(_only(each, verdict.others, is_in), ranks) for each, ranks in distinct_descriptions(others)]
        for is_in in (True, False)
    )

    def stop_at(stage: int, own: Sequence[Problem], why: str | None = None) -> None:
        some = [problem for problem in verdict.problems if problem.stage == stage]
        texts = [problem.text for problem in sorted([*own, *some], key=lambda problem: problem[:3])]
        more = {} if why is None else {"why": why}
        raise_if_any(texts, len(own) + (verdict.many if some else 0), **more)

    problems: list[Problem] = []
    sides = [join_side(alone, side, problems, gone) for side in SIDES]
    stop_at(0, problems + replica_problems(alone, problems))
    both = sides[0].keys() & sides[1].keys()
    left_out = [sorted({*found} - both) + names for found, names in zip(sides, verdict.alone)]
    if not strict and not both and not verdict.both:
        lone = sorted([(name, sides) for names, sides in zip(left_out, (SIDES, SIDES[::-1])) for name in names])
        raise_if_any(["they have no name in common", *itertools.starmap(lacking, lone)])
    names = sorted({*sides[0], *sides[1]} if strict else both)
    stop_at(1, [Problem(1, 0, n, text) for n in names for text in differences(n, *[side.get(n) for side in sides])])
    stop_at(2, [], UNCOVERED)
    lies = [found | join_side(mixed, side, [], gone) for found, side in zip(sides, SIDES)]
    tensors = [Tensor(name, *[side[name] for side in sides]) for name in sorted(both)]
    return Others(tensors, {side: tuple(sorted(names)) for side, names in zip(SIDES, left_out)}, lies)


def _only(description: Description, names: set[str], is_in: bool) -> Description:
    """What a rank says of the tensors with these names, or of the others."""
    source, target = (
        {n: sharding for n, sharding in some.items() if (n in names) == is_in} for some in description[:2]
    )
    digests = {name: seen for name, seen in (description.digests or {}).items() if (name in names) == is_in}
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
    """Plan the tensors of this rank, hear of its own part in all, and what to tell all ranks. Collective over the team,
    each of whose ranks is a planner.

    Args:
        own: what this rank has.
        digest: of the piece of a source, by its name and number.
        enter: hears of each step, and whether it waits for others.
    """
    messages, names = statements([in_pieces(shardings) for shardings in (own.source, own.target)], len(team.ranks))
    enter("telling planners of pieces", True)
    came = dict(zip(team.ranks, team.swap(messages)))
    enter("planning pieces", False)
    planner = Planner(came, others, gone, strict)
    told = planner.answers(team.ranks)
    enter("hearing from planners", True)
    answers = Answers(team.swap(told), names, names_of_others(others))
    del came, messages, told
    enter("reading replicas of pieces", False)
    problem, seen = None, [b""] * len(team.ranks)
    try:
        seen = answers.digests(digest)
    except Exception as error:  # of a tensor that can't be read; all ranks hear of it
        problem = str(error) if isinstance(error, (TypeError, ValueError, RuntimeError)) else repr(error)
    enter("comparing replicas of pieces", True)
    planner.compare(dict(zip(team.ranks, team.swap(seen))))
    return answers, {**planner.verdict(), "problem": problem}
