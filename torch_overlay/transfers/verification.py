"""Compare what targets of a `Transfer` hold with what its sources hold, without sending a tensor. Start at `verify`.

The plan of a run says which elements of a source go to which place in a target. So both ends compute digests of the
same elements, in the target's dtype, and only these travel: 16 bytes a message, and only where something differs, 16
bytes for each part of a tensor in it. Each target is compared with the source itself, also where a relay passes
elements on.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..distributed.tensor._planner.boxes import Box
from ..distributed.tensor._runner.exchange import part
from ..show.words import counted
from ._planner.boxes import blocks
from ._planner.schedule import Schedule
from .blocks import BY_WIDTH, present
from .comparison import SHOWN, raise_if_any
from .pieces import settled, word_sums
from .run import Run, name_of
from .tensor_moves import moves_of
from .trees import with_paths

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..rendezvous.team import Team
    from ._planner.schedule import Stream
    from .blocks import Locals
    from .run import TransferState
    from .tensor_moves import TensorMove

DIGEST = 16  # bytes
# Elements that are hashed at a time; a part that isn't contiguous is copied so. On a GPU each chunk is waited for.
CHUNK, CHUNK_ON_GPU = 1 << 18, 1 << 26
JOINED = 1 << 20  # bytes


class Elements(NamedTuple):
    """Elements of a local tensor that both ends of a message have.

    Attributes:
        move: its index.
        box: of the local tensor.
        first, last: of the box, counted row-major, the elements from `first` to `last - 1`.
    """

    move: int
    box: Box
    first: int
    last: int


def verify(transfer: TransferState, only: object, unheard: Sequence[str]) -> None:
    """Compare all targets with their sources. Collective over the ranks of the Transfer."""
    run = Run.check(transfer, only, unheard)
    run.report = run.report._replace(verifies=True)
    levels = transfer.agreement.levels
    named = [name for name in run.report.only or () if name in levels]
    if named:
        run.report.problems.append(f"verify() can't compare {named[0]!r}: it comes in stages, and isn't kept")
    run.indices = [index for index in run.indices if transfer.agreement.moves[index].tensor.name not in levels]
    if transfer.is_stale:
        run.report.problems.append("verify(): bind() gave it other tensors, and no run has filled them yet")
    if run.shared.overwritten:
        run.report.problems.append("verify(): targets lie in the memory of sources, which a run overwrites")
    if transfer.agreement.contents is not None:
        run.report.problems.append("verify() compares tensors, and the source is a checkpoint")
    # Autocast refuses to join float8 tensors.
    exact = torch.autocast(transfer.device.type, enabled=False)
    with span(f"verify {counted(len(run.indices), 'tensor')}"), torch.inference_mode(), exact:
        with run.in_step("the reports before comparing"):
            problems = run.agree().problems
            differences, count = ([], 0) if problems else _differences_of_all(transfer, run)
        run.raise_if_any(problems)
    texts = [with_paths(text, transfer.agreement.paths) for text in differences]
    raise_if_any(texts, count, f"{name_of(transfer.ranks)}: targets don't hold what their sources hold now")


def _differences_of_all(transfer: TransferState, run: Run) -> tuple[list[str], int]:
    """Say what differs on any rank, in words, at least the first few; and how much does. The same on all ranks.
    Collective."""
    group, team = run.group, run.group.team
    moves, sources, targets = _direct(transfer, run)
    group.enter("computing digests", False)
    schedule = Schedule.of([each.move for each in moves], team.rank, transfer.agreement.gone)
    dtypes = [getattr(torch, each.tensor.target.dtype) for each in moves]
    canonical = [each.tensor.is_cast for each in moves]  # a cast may change the bits of a NaN

    def bits(each: Elements, locals_: Locals) -> Iterator[torch.Tensor]:
        return (_bits(chunk, dtypes[each.move], canonical[each.move]) for chunk in _chunks(each, locals_))

    def of_messages(stream: Stream, locals_: Locals) -> bytes:
        return _digest(itertools.chain.from_iterable([bits(each, locals_) for each in _parts(stream)]))

    def of_parts(stream: Stream, locals_: Locals) -> bytes:
        return b"".join([_digest(bits(each, locals_)) for each in _parts(stream)])

    found = []
    for number, before, after in schedule.kept:
        elements = _kept_differ(number, before, after, sources, targets, canonical[number])
        if elements:
            found.append(
                _difference(moves[number], Elements(number, after, 0, after.elements), elements, team.rank, team.rank)
            )
    sent = {peer: of_messages(stream, sources) for peer, stream in schedule.sends.items()}
    own = {peer: of_messages(stream, targets) for peer, stream in schedule.receives.items()}
    group.enter("comparing digests", True)
    if any(differs for (differs,) in team.gather([int(own != _swapped(team, sent, own))])):
        # Only now each part of a message gets a digest of its own, which says where it is.
        group.enter("computing digests of parts", False)
        sent = {peer: of_parts(stream, sources) for peer, stream in schedule.sends.items()}
        own = {peer: of_parts(stream, targets) for peer, stream in schedule.receives.items()}
        group.enter("comparing digests of parts", True)
        came = _swapped(team, sent, own)
        for peer, stream in schedule.receives.items():
            for number, each in enumerate(_parts(stream)):
                place = slice(DIGEST * number, DIGEST * (number + 1))
                if own[peer][place] != came[peer][place]:
                    found.append(_difference(moves[each.move], each, None, team.rank, peer))
    differences = run.replica_problems(True, False)
    count = sum([number for (number,) in team.gather([len(found)])])
    if count:
        differences += [text for of_rank in team.gather_data(found[:SHOWN]).values() for text in of_rank]
    return differences, max(count, len(differences))


def _swapped(team: Team, sent: Mapping[int, bytes], own: Mapping[int, bytes]) -> dict[int, bytes]:
    """Send digests to the receivers of messages. Returns those of the senders of this rank's (`own`). Collective."""
    if team.is_fake:
        return {**own}
    if team.control is None and len(team.ranks) > 1:
        said = team.gather_data({str(peer): message.hex() for peer, message in sent.items()})
        return {peer: bytes.fromhex(said[peer].get(str(team.rank), "")) for peer in own}
    came = dict(zip(team.ranks, team.swap([sent.get(rank, b"") for rank in team.ranks])))
    return {peer: came[peer] for peer in own}


def _direct(transfer: TransferState, run: Run) -> tuple[Sequence[TensorMove], Locals, Locals]:
    """Return the moves from sources to targets, without a relay, and their local tensors."""
    agreement = transfer.agreement
    planned = [agreement.moves[index] for index in run.indices]
    if not agreement.passed:
        return planned, [run.sources[n] for n in run.indices], [run.targets[n] for n in run.indices]
    names = {each.tensor.name for each in planned}
    direct = moves_of([tensor for tensor in agreement.tensors if tensor.name in names], agreement.gone, {})
    # A piece is the source, or the target, of several moves. Each of them has it as its local tensor.
    sources = {(each.tensor.name, each.numbers[0]): run.sources[n] for each, n in zip(planned, run.indices)}
    targets = {(each.tensor.name, each.numbers[1]): run.targets[n] for each, n in zip(planned, run.indices)}
    return (
        direct,
        [sources.get((each.tensor.name, each.numbers[0])) for each in direct],
        [targets.get((each.tensor.name, each.numbers[1])) for each in direct],
    )


def _parts(stream: Stream) -> Iterator[Elements]:
    """Yield what a stream carries, one tensor after the other, in an order that both ends know."""
    for tensors, _, box, first, last in stream.items:
        for tensor in tensors:
            yield Elements(tensor, box, first, last)


def _chunks(each: Elements, locals_: Locals) -> Iterator[torch.Tensor]:
    """Yield the elements of a part in row-major order, as flat tensors."""
    local = present(locals_[each.move])
    view, chunk = part(settled(local).detach(), each.box), CHUNK if local.is_cpu else CHUNK_ON_GPU
    if view.is_contiguous():
        # Not view(-1): of a dim of length 1 the stride may be anything.
        yield from view.as_strided((view.numel(),), (1,))[each.first : each.last].split(chunk)
        return
    for begin in range(each.first, each.last, chunk):
        boxes = blocks(Box((0,) * view.dim(), tuple(view.shape)), begin, min(begin + chunk, each.last))
        yield torch.cat([part(view, box).reshape(-1) for box in boxes])


def _bits(values: torch.Tensor, dtype: torch.dtype, is_canonical: bool) -> torch.Tensor:
    """Return flat values in a dtype, as integers. With `is_canonical` all NaN are one."""
    values = values.resolve_conj().resolve_neg().to(dtype)
    if is_canonical:
        values = torch.where(values.isnan(), torch.full_like(values, torch.nan), values)
    return values.view(BY_WIDTH[dtype.itemsize])


def _digest(chunks: Iterable[torch.Tensor]) -> bytes:
    """Hash chunks of integers, in this order. Short ones are joined first: hashing takes ten operations."""
    hashed = hashlib.blake2b(digest_size=DIGEST)
    waiting, size = list[torch.Tensor](), 0

    def hash_waiting() -> None:
        flat = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        hashed.update(repr(word_sums(flat)).encode())

    for chunk in chunks:
        waiting.append(chunk.view(torch.uint8))
        size += len(waiting[-1])
        if size >= JOINED:
            hash_waiting()
            waiting, size = [], 0
    if waiting:
        hash_waiting()
    return hashed.digest()


def _kept_differ(number: int, before: Box, after: Box, sources: Locals, targets: Locals, is_canonical: bool) -> int:
    """Count the elements that differ between a box of this rank's source and the same box of its target."""
    dtype = present(targets[number]).dtype
    sides = [
        _chunks(Elements(number, box, 0, box.elements), locals_)
        for box, locals_ in ((before, sources), (after, targets))
    ]
    count = 0
    for old, new in zip(*sides):
        both = [_bits(values, dtype, is_canonical) for values in (old, new)]
        if dtype.itemsize > 8:  # as numbers, -0.0 equals 0.0, and NaN nothing
            both = [values.view(torch.int64).view(-1, dtype.itemsize // 8) for values in both]
        differ = both[0] != both[1]
        count += int((differ.any(1) if differ.dim() > 1 else differ).count_nonzero())
    return count


def _difference(move: TensorMove, each: Elements, elements: int | None, rank: int, source: int) -> str:
    """Say what differs, in words. `elements` is how many, None if nobody counted them."""
    own = move.move.wanted(rank)
    start = each.box.start if own is None else tuple(map(sum, zip(own.start, each.box.start)))
    where = f"its box of shape {each.box.length} that starts at {start}"
    if (each.first, each.last) != (0, each.box.elements):
        where += f", in elements {each.first} to {each.last - 1} of it"
    many = "" if elements is None else f", {elements} of {each.box.elements} elements"
    of = "its own source" if rank == source else f"the source of {of_ranks([source])}"
    return f"the target {move.tensor.name!r} of {of_ranks([rank])} differs from {of} in {where}{many}"
