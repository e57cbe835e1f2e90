"""The hops of a relay (`_planner/relay.py`) as parts of a run: which tensors of this rank each part reads and writes.

The first hop reads the sources. Each later one reads and writes targets. A large transfer is cut into rounds, and a
round begins while earlier ones are passed on: part 3 of a run has the first hop of round 3, the second hop of round 2
and the third one of round 1. So each host sends and receives at once. Start at `parts_of`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ._planner.piece_moves import PieceMove
from .exchanges import GOING, Going, InTurn, Torn, nothing

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..distributed.tensor._planner.boxes import Box
    from ._planner.schedule import AnyMove
    from .blocks import Locals
    from .descriptions import Tensor
    from .exchanges import AnyExchanges
    from .relays import Passing
    from .sharding import Sharding
    from .stages import Turns
    from .tensor_moves import TensorMove


class PassedOn(NamedTuple):
    """A move of a hop after the first one, from pieces of a tensor's target to pieces of the same target.

    Attributes:
        source: the index of a move of the first hop whose target is the piece that it reads.
        target: in the same way, for the piece that it writes.
        part: the part of a run in which it goes.
    """

    move: PieceMove
    source: int
    target: int
    part: int


def hops_of(first_hop: Sequence[TensorMove], relays: Mapping[str, Sequence[Passing]]) -> list[PassedOn]:
    """List the moves of all hops after the first one."""
    numbers: dict[str, dict[int, int]] = {}
    tensors: dict[str, Tensor] = {}
    for number, first in enumerate(first_hop):
        numbers.setdefault(first.tensor.name, {}).setdefault(first.numbers[1], number)
        tensors[first.tensor.name] = first.tensor
    passed: list[PassedOn] = []
    for name, of_tensor in relays.items():
        if name not in tensors:
            continue
        tensor, known = tensors[name], numbers[name]
        # Piece numbers that no move of the first hop has, for instance of empty pieces, need no later hop.
        pairs = [pair for pair in _pairs(tensor.target) if known.keys() >= {*pair}]
        for round_, _, relay in of_tensor:
            # One more hop without hosts, two with them.
            for level, pieces in enumerate(() if relay is None else relay.hops, 1):
                for source, target in pairs:
                    move = PieceMove(pieces, (source, target), tensor.wire.itemsize, tensor.target.ranks)
                    passed.append(PassedOn(move, known[source], known[target], round_ + level))
    return passed


@lru_cache(maxsize=256)
def _pairs(target: Sharding) -> list[tuple[int, int]]:
    """Return the pairs of piece numbers of a target between which elements may move: those of boxes that overlap."""
    if max(map(len, target.pieces), default=1) == 1:
        return [(0, 0)]
    # Of boxes that overlap in part, a cell of `Pieced` has the holders of one alone.
    boxes = {each for of_rank in target.pieces for each in enumerate(of_rank) if each[1].elements}
    return sorted(overlapping(boxes, len(target.regions.shape)))


def overlapping(boxes: Collection[tuple[int, Box]], ndim: int) -> set[tuple[int, int]]:
    """The pairs of numbers, either way round, whose boxes have an element in common; each with itself, too."""
    if not ndim:
        return {(first, second) for first, _ in boxes for second, _ in boxes}
    # Along the dim in which most of them begin apart, few are open at one time: of experts, those of one expert.
    dim = max(range(ndim), key=lambda dim: len({box.start[dim] for _, box in boxes}))
    pairs = set[tuple[int, int]]()
    open_: list[tuple[int, Box]] = []
    for number, box in sorted(boxes, key=lambda each: each[1].start[dim]):
        open_ = [each for each in open_ if each[1].start[dim] + each[1].length[dim] > box.start[dim]]
        open_.append((number, box))
        meeting = [other for other, its in open_ if box.meet(its).elements]
        pairs |= {pair for other in meeting for pair in ((number, other), (other, number))}
    return pairs


class RunPart(NamedTuple):
    """What goes at the same time in a run: one hop of each of some rounds.

    Attributes:
        moves: of the tensors.
        sources: for each move, the local tensor that it reads: False and a place in the plan for a source, True and a
            place for a target.
        targets: for each move, the place in the plan of the target that it writes.
    """

    moves: list[AnyMove]
    sources: list[tuple[bool, int]]
    targets: list[int]

    def add(self, move: AnyMove, source: tuple[bool, int], target: int) -> None:
        """Add a move."""
        self.moves.append(move)
        self.sources.append(source)
        self.targets.append(target)


def parts_of(
    moves: Sequence[TensorMove], passed: Sequence[PassedOn], indices: Sequence[int], is_checkpoint: bool = False
) -> list[RunPart]:
    """List the parts of a run of some moves, in order. All rounds of a checkpoint are the first part."""
    parts: dict[int, RunPart] = {}
    for place, index in enumerate(indices):
        number = 0 if is_checkpoint else moves[index].round
        parts.setdefault(number, RunPart([], [], [])).add(moves[index].move, (False, place), place)
    place_of = {index: place for place, index in enumerate(indices)}
    for move, source, target, number in passed:
        if source in place_of:
            part = parts.setdefault(number, RunPart([], [], []))
            part.add(move, (True, place_of[source]), place_of[target])
    # A rank without a move takes part in the exchanges all the same.
    return [parts[number] for number in sorted(parts)] or [RunPart([], [], [])]


class Hops(NamedTuple):
    """All hops of a relay that stands beside straight moves of the same tensors.

    Attributes:
        first: the moves of the first hop.
        passed: those of all later ones.
    """

    first: Sequence[TensorMove]
    passed: Sequence[PassedOn]

    def parts(self, straight: Sequence[TensorMove]) -> list[RunPart]:
        """List the parts of a run of the tensors that these straight moves bring, with tensors numbered as there."""
        at: list[dict[tuple[str, int], int]] = [{}, {}]  # of sources and targets, by name and number of the piece
        for place, move in enumerate(straight):
            for of_side, number in zip(at, move.numbers):
                of_side.setdefault((move.tensor.name, number), place)
        names = {move.tensor.name for move in straight}
        indices = [index for index, move in enumerate(self.first) if move.tensor.name in names]

        def place_of(is_target: bool, place: int) -> int:
            tensor, numbers, *_ = self.first[indices[place]]
            return at[is_target][tensor.name, numbers[is_target]]

        return [
            RunPart(
                part.moves,
                [(is_target, place_of(is_target, place)) for is_target, place in part.sources],
                [place_of(True, place) for place in part.targets],
            )
            for part in parts_of(self.first, self.passed, indices)
        ]


class Parts(InTurn):
    """Runs the parts of a plan, one after the other. See `AnyExchanges`.

    Args:
        parts: in order, each with the exchanges that run it.
        turns: of this rank's stages.
    """

    def __init__(self, parts: Sequence[tuple[RunPart, AnyExchanges]], turns: Turns) -> None:
        super().__init__([exchanges for _, exchanges in parts])
        self._parts, self.turns = parts, turns
        read = [part.sources[number] for part, exchanges in parts for number in exchanges.reads]
        self.reads = frozenset([place for is_target, place in read if not is_target])
        # The last part that reads sources. Checkpoints are read there, too, and no tensor of the program is.
        firsts = [number for number, (part, _) in enumerate(parts) if not all(source[0] for source in part.sources)]
        self._last_first = firsts[-1] if firsts else 0
        for number, exchanges in enumerate(self._every, 1):
            exchanges.label = f"part {number} of {len(parts)}, "

    @property
    def seconds(self) -> dict[str, float]:
        return {**super().seconds, "stages": self.turns.seconds}

    def run(self, sources: Locals, targets: Locals, going: Going = GOING) -> None:
        """Run all parts. Collective."""
        targets = [*targets]
        self.turns.start(targets)
        finish = partial(self.turns.finish, going.watch)
        try:
            self._run_parts(sources, targets, going._replace(began=finish))
            finish()
        finally:
            self.turns.free()

    def _run_parts(self, sources: Locals, targets: Locals, going: Going) -> None:
        self.written = frozenset()
        for number, (part, exchanges) in enumerate(self._parts):
            now = going if number == self._last_first else going._replace(sent=nothing)
            if self.turns.begin(number):  # memory that views which are kept would hold
                now = now._replace(keeps=False, state=None)
            try:
                own = [targets[place] if is_target else sources[place] for is_target, place in part.sources]
                exchanges.run(own, [targets[place] for place in part.targets], now)
            except Exception as error:
                if self.written and not isinstance(error, Torn):
                    raise Torn(str(error)) from error
                raise
            finally:  # also if it failed: the version counters of the targets that it wrote have to rise
                self.written |= {part.targets[place] for place in exchanges.written}
            self.turns.end(number)
