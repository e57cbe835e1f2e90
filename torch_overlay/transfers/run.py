"""A run of a `Transfer` on one rank: check its tensors, agree with all ranks, exchange, finish. Start at `Run.go`."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..distributed._mesh.text import of_ranks
from ..errors import TransferFailed
from ._planner.memory import NOTHING_SHARED, Shared
from .background import keep_for_this_stream
from .bound_tensors import LastRun, copies, locals_of, shared_memory
from .comparison import by_sentence
from .descriptions import shared_targets
from .exchanges import Going, Torn, nothing
from .source_values import replica_problems_now
from .stages import torn_groups
from .stats import Progress, RunStats
from .transfer_plan import bytes_for_buffers
from .trees import with_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..rendezvous.group import TransferGroup
    from ..rendezvous.team import Team
    from .agreement import Agreement
    from .blocks import Buffers, Locals
    from .bound_tensors import BoundTensor
    from .options import Options
    from .stages import Stages
    from .transfer_plan import Plan, Plans

logger = logging.getLogger(__name__)

RAN, NEWS = "ran", "news"  # how a run ended: servers came or left, and it didn't begin
NO_VERSION = -(1 << 62)  # travels in place of a version


def checked_names(only: Any) -> tuple[tuple[str, ...] | None, list[str]]:
    """Check what the user gave as `only=`. Raises nothing: a problem goes into the rank's report."""
    if only is None:
        return None, []
    # A string is iterable, too, and a name that was given without a list around it would be taken for its letters.
    names: list[Any] = [*only] if isinstance(only, Iterable) and not isinstance(only, str) else [None]
    if not all(isinstance(name, str) for name in names):
        return None, [f"only= takes several names, and got {only!r}"]
    return tuple(sorted({*names})), []


def checked_version(version: Any) -> tuple[int | None, list[str]]:
    """Check what the user gave as `version=`. Raises nothing: a problem goes into the rank's report."""
    if version is None or (isinstance(version, int) and abs(version) < -NO_VERSION):
        return version, []
    return None, [f"version= takes a whole number of less than 63 bits, and got {version!r}"]


class RunDecision(NamedTuple):
    """What the reports of all ranks come to; the same on all ranks.

    Attributes:
        problems: why which ranks can't run, in words; the run goes on if there are none.
        version: what the sources gave as `version=`; None if they gave none.
        is_background: True if some rank runs in the background. All ranks then compare, at the end, whether sources
            changed meanwhile.
        need_whole: the ranks that need everything whole, since they lack what was sent to them last.
        are_ties_apart: True if on some rank the sources of targets that are one block of memory are not.
        is_news: True if servers came to an open place, or left, so that the Transfer is made anew before it runs.
        unfit: the ranks of servers at an open place that can't run, where all trainers can: each with its problems.
    """

    problems: list[str]
    version: int | None = None
    is_background: bool = False
    need_whole: frozenset[int] = frozenset()
    are_ties_apart: bool = False
    is_news: bool = False
    unfit: Mapping[int, list[str]] = {}


class Unfit(ValueError):
    """Servers of an open place can't run: the ranks `failed`. All others go on without them."""

    def __init__(self, message: str, failed: Iterable[int]) -> None:
        super().__init__(message)
        self.gone, self.failed = (), tuple(failed)


class RunReport(NamedTuple):
    """What a rank tells the others before a run, while nothing has been sent.

    Attributes:
        problems: why it can't run, in words.
        only: the names of the tensors to move, in order; None for all.
        version: as the rank gave it to `run`; None if it gave none.
        checks: whether it gave `check=True`.
        is_background: whether it gave `async_op=True`.
        needs_whole: whether its targets may differ from what was sent to it last, so that changes alone aren't enough.
        are_ties_apart: whether its sources of targets that are one block of memory are not, so that their values may
            differ.
        verifies: whether it called `verify` in place of `run`.
        is_news: at an open place, whether servers came or left, as rank 0 knows, or its tensors are others.
    """

    problems: list[str]
    only: tuple[str, ...] | None = None
    version: int | None = None
    checks: bool = False
    is_background: bool = False
    needs_whole: bool = False
    are_ties_apart: bool = False
    verifies: bool = False
    is_news: bool = False

    def agree(self, team: Team, trainers: int | None = None) -> RunDecision:
        """Exchange the reports of all ranks, and decide whether and how they run. Collective.

        If nothing is wrong, each rank sends eight integers. Otherwise ranks then also exchange the text of their
        problems.

        Args:
            trainers: how many there are at an open place, where servers have to fit them; else None.
        """
        only = 0 if self.only is None else 1 + zlib.crc32("\0".join(self.only).encode(errors="surrogatepass"))
        version = NO_VERSION if self.version is None else self.version
        flags = 2 * self.verifies + self.checks, self.is_background, self.needs_whole, self.are_ties_apart, self.is_news
        rows = [_Row(*row) for row in team.gather([len(self.problems), only, version, *map(int, flags)])]
        by_rank, verifies = dict(zip(team.ranks, rows)), any(row.checks > 1 for row in rows)
        leading = {rank: row for rank, row in by_rank.items() if trainers is None or verifies or rank < trainers}
        given, versions = ({row.version for row in some} - {NO_VERSION} for some in (rows, leading.values()))
        versions = versions or {*sorted(given)[:1]}
        runs = (0, *next(iter(leading.values())).way[1:])
        unfit = [rank for rank, row in by_rank.items() if row.way != runs or row.version not in (NO_VERSION, *versions)]
        fits = len(versions) < 2 and leading.keys().isdisjoint(unfit)
        if fits and not unfit:
            need_whole = frozenset([rank for rank, row in by_rank.items() if row.needs_whole])
            background, apart, news = (any(each) for each in zip(*[(r.background, r.apart, r.news) for r in rows]))
            return RunDecision([], next(iter(versions), None), background, need_whole, apart, news)
        words = [*self.problems]
        if len({row.only for row in rows}) > 1:
            words.append("runs all of it" if self.only is None else f"runs only {', '.join(map(repr, self.only))}")
        if len(given) > 1 and self.version is not None:
            words.append(f"says version {self.version}")
        # A rank that refuses doesn't say which of both it would do.
        if len({row.checks for row in rows}) > 1 and not any(row.problems for row in rows):
            words.append("verifies" if self.verifies else f"runs with check={self.checks}")
        texts = team.gather_data(words)
        return RunDecision([], unfit={rank: texts[rank] for rank in unfit}) if fits else RunDecision(by_sentence(texts))


class _Row(NamedTuple):
    """What a rank sends of its report."""

    problems: int
    only: int
    version: int
    checks: int
    background: int
    needs_whole: int
    apart: int
    news: int

    @property
    def way(self) -> tuple[int, ...]:
        """Whether it runs, and how: the same on all ranks that run together."""
        return self.problems, self.only, self.checks


@dataclass
class TransferState:
    """A `Transfer` on this rank: what ranks agreed on, and what one run leaves for the next one.

    Attributes:
        sources, targets: by index of the move; None where this rank has no part.
        device: of this rank's tensors.
        stages: of this rank.
        group, buffers, plans: set when they are made; a rank without a part in the Transfer has none.
        progress: as `Transfer` takes it.
        version, stats, changed: of the last run, as `Transfer` has them.
        last_runs: with `keep`, by the names that were moved.
        seen: the names that were looked at last, where their tensors lay, and what memory they shared.
        needs_whole: whether this rank needs everything whole, since it lacks what `changes` builds on.
        wrote: by index of the move, where the last run left its target.
        is_stale: at an open place, whether this rank has other tensors since, so that the Transfer is made anew.
        has_snapshot: at an open place, whether the sources are copies, until the run ends.
    """

    agreement: Agreement
    options: Options
    sources: list[BoundTensor | None]
    targets: list[BoundTensor | None]
    device: torch.device
    stages: Stages | None = None
    group: TransferGroup | None = None
    buffers: Buffers = field(init=False)
    plans: Plans = field(init=False)
    progress: Callable[[int, int], object] | None = None
    version: int | None = None
    stats: RunStats | None = None
    changed: tuple[int, int] = (0, 0)
    last_runs: dict[tuple[str, ...] | None, LastRun] = field(default_factory=dict)
    seen: tuple[object, object, Shared] | None = None
    needs_whole: bool = False
    wrote: dict[int, object] = field(default_factory=dict)
    is_stale: bool = False
    has_snapshot: bool = False

    @property
    def ranks(self) -> list[int]:
        """Those of both sides, ascending."""
        return self.agreement.ranks


def shared_by(
    transfer: TransferState, names: tuple[str, ...] | None, indices: Sequence[int], sources: Locals, targets: Locals
) -> Shared:
    """Find out which of these tensors share memory on this rank.

    The last answer is remembered, and holds while each tensor lies where it lay, so that a run of the same tensors
    compares their addresses and not the memory of every pair.
    """
    sides = transfer.sources, transfer.targets
    locations = [tensor and tensor.location for side in sides for tensor in map(side.__getitem__, indices)]
    if transfer.seen is None or transfer.seen[:2] != (names, locations):
        transfer.seen = names, locations, shared_memory(indices, sources, targets, *sides)
    return transfer.seen[2]


def memory_of_targets(transfer: TransferState, indices: Sequence[int], targets: Locals) -> dict[int, object]:
    """Return where the targets lie and how often they were written, by index of the move.

    If that differs from what the last run left, the program may have overwritten what that run brought, and changes
    alone would leave the target wrong.
    """
    memory: dict[int, object] = {}
    for index in indices if transfer.options.changes else ():
        tensor, local = transfer.targets[index], targets[index]
        if tensor is not None and local is not None and not tensor.is_staged:
            # While there is a weak reference to a storage, no other storage gets its id.
            storage = StorageWeakRef(local.untyped_storage())
            versions = tensor.versions
            counted = object() if None in versions else versions
            memory[index] = storage, local.data_ptr(), local.shape, local.stride(), counted
    return memory


def memory_problems(transfer: TransferState, shared: Shared) -> list[str]:
    """Say for which targets a write would spoil another target, and which of them became one block of memory since the
    Transfer was made, in words."""
    return shared_targets(shared) + [
        f"the targets {', '.join(map(repr, names))} became one block of memory since this Transfer was made"
        for names in shared.tied
        if names not in transfer.agreement.tied
    ]


def name_of(ranks: Sequence[int], version: int | None = None) -> str:
    """Begin an error of a run, with its version if it has one."""
    return f"A Transfer over {of_ranks(ranks)}" + ("" if version is None else f", version {version},")


class Run:
    """One run of a `Transfer` on this rank. `check` looks at its tensors; then `go` runs, collectively.

    Attributes:
        report: what the other ranks hear before anything is sent.
        indices: of the moves whose tensors it reads and writes.
        sources, targets: their local tensors, by index of the move; sources may be copies.
        shared: which of them share memory.
        state: with `keep`, what the next run of the same tensors finds.
    """

    def __init__(self, transfer: TransferState, report: RunReport) -> None:
        self._transfer, self.report = transfer, report
        self.indices: Sequence[int] = ()
        self.sources: Locals = []
        self.targets: Locals = []
        self.shared = NOTHING_SHARED
        self.state: LastRun | None = None
        self._is_snapshot = self._has_copies = self._is_exchanged = False
        self._called = name_of(transfer.ranks)
        self._seconds: dict[str, float] = {}  # what it took so far, for `RunStats`
        self._problems_beside: list[str] = []  # what changed beside a run in the background, and what a function raised
        self._raised: Exception | None = None  # by a function of a stage
        # At an open place: it isn't over, or a trainer that didn't hear of this would leave the version out.
        self._begins_again = False

    @property
    def group(self) -> TransferGroup:
        """That of the Transfer."""
        group = self._transfer.group
        if group is None:
            raise AssertionError("a rank that takes part has a group")
        return group

    # --- Check: this rank alone. Nothing raises here: what is wrong goes into the report, so that all ranks raise it.
    # If only this rank raised, the others would wait for it until the timeout. ---

    @staticmethod
    def check(
        transfer: TransferState,
        only: Any,
        unheard: Sequence[str],
        version: Any = None,
        check: bool = False,
        async_op: bool = False,
        snapshot: bool = False,
    ) -> Run:
        """Read this rank's tensors, and copy sources that have to be copied before anything is written."""
        begun = time.perf_counter()
        names, problems = checked_names(only)
        version, version_problems = checked_version(version)
        run = Run(transfer, RunReport(problems, names, version, check, async_op))
        run._is_snapshot = snapshot
        run.indices, unknown = transfer.agreement.indices_of(names)
        problems += [*version_problems, *unknown, *unheard]
        if transfer.stages is not None:
            problems += [] if names is None else torn_groups(transfer.stages.names, names)
            if async_op and transfer.device.type != "cpu":
                problems.append("runs in the background on a GPU, where stages= needs a run that the program waits for")
        run._read(names, problems)
        files = transfer.agreement.files
        problems += [] if files is None else files.changes()
        are_ties_apart = not problems and run._are_ties_apart(names)
        if run.state is not None:
            transfer.last_runs[names] = run.state
        run._copy(names, problems)
        now = memory_of_targets(transfer, run.indices, run.targets)
        needs_whole = transfer.needs_whole or any(
            transfer.wrote.get(index, where) != where for index, where in now.items()
        )
        place = transfer.agreement.place
        is_news = place is not None and place.fleet is not None and place.fleet.is_news()
        run.report = run.report._replace(needs_whole=needs_whole, are_ties_apart=are_ties_apart, is_news=is_news)
        run._seconds["check"] = time.perf_counter() - begun
        return run

    def _read(self, names: tuple[str, ...] | None, problems: list[str]) -> None:
        """Find the local tensors, and what memory they share: as in the last run of these names, if nothing moved."""
        transfer = self._transfer
        # Taken out, so that a run that fails leaves no state behind.
        state = transfer.last_runs.pop(names, None)
        if state is not None and not problems and state.is_unchanged():
            self.sources, self.targets, self.shared, self.state = state.sources, state.targets, state.shared, state
            return
        del state  # it holds memory that the program's tensors gave up since
        self.sources, source_problems = locals_of(transfer.sources, self.indices)
        self.targets, target_problems = locals_of(transfer.targets, self.indices)
        problems += [*source_problems, *target_problems]
        if not problems:
            self.shared = shared_by(transfer, names, self.indices, self.sources, self.targets)
            problems += memory_problems(transfer, self.shared)
        if transfer.options.keep and transfer.agreement.contents is None and not problems:
            tensors = [side[index] for side in (transfer.sources, transfer.targets) for index in self.indices]
            self.state = LastRun(tensors, self.sources, self.targets, self.shared)

    def _copy(self, names: tuple[str, ...] | None, problems: list[str]) -> None:
        """Copy the sources, for a snapshot, or those that targets overwrite before they are read."""
        transfer = self._transfer
        plan = transfer.plans.by_names.get(names)
        # The first run of some names plans them later, with what the copies leave of the budget.
        staging = 0 if plan is None else plan.exchanges.staging
        room = transfer.agreement.budget - staging
        if self._is_snapshot:
            self.sources, too_large = copies(self.sources, room, self.indices, "a snapshot", transfer.has_snapshot)
            problems += too_large
        elif self.shared.overwritten:
            read = self.indices if plan is None else {self.indices[place] for place in plan.exchanges.reads}
            why = "copying this rank's sources that its targets overwrite"
            copied = self.shared.overwritten.keys() & read
            self.sources, too_large = copies(self.sources, room, copied, why)
            problems += too_large
        self._has_copies = self._is_snapshot or bool(self.shared.overwritten)
        if transfer.options.keep:
            for_buffers = transfer.plans.by_names[None].exchanges.staging if plan is None else staging
            limit = for_buffers if self._has_copies else bytes_for_buffers(transfer.agreement)
            transfer.buffers.keep(limit)

    def _are_ties_apart(self, only: tuple[str, ...] | None) -> bool:
        """True if targets of several names are one block of memory, and this rank's sources of these names are not, so
        that their values may differ."""
        agreement = self._transfer.agreement
        if not agreement.tied or agreement.contents is not None:
            return False
        held: dict[str, set[object]] = {name: set() for names in agreement.tied for name in names}
        for index in self.indices:
            name = agreement.moves[index].tensor.name
            tensor, local = self._transfer.sources[index], self.sources[index]
            if name in held and tensor is not None and local is not None:
                part = tensor.part(local)
                # Its type, its box of the whole tensor, and the memory; nothing if the box is empty.
                held[name].update([] if part is None else [part[1:]])
        groups = [[name for name in names if only is None or name in only] for names in agreement.tied]
        return any(len({frozenset(held[name]) for name in names}) > 1 for names in groups)

    def hold(self) -> None:
        """Make this a run in the background: note what the program could change while it goes on, and hold the memory
        of this moment. After `p.data = other` it would read the memory of `other`, and send its values in place of
        p's."""
        transfer = self._transfer
        read = [] if self._is_snapshot else [transfer.sources[index] for index in self.indices]
        self._versions = [(tensor, tensor.versions, tensor.memory) for tensor in read if tensor is not None]
        written = [transfer.targets[index] for index in self.indices]
        self._homes = [(tensor, tensor.memory) for tensor in written if tensor is not None]
        self.sources, self.targets = (
            [None if local is None else local.detach() for local in side] for side in (self.sources, self.targets)
        )

    # --- With all ranks ---

    # Tensors made in inference mode can be written in inference mode only, others in either. No tensor made here stays.
    @torch.inference_mode()
    def go(self, sent: Callable[[], None] = nothing) -> str:
        """Run. Calls `sent` when no source is read any more. Collective over the ranks of the Transfer.

        Returns RAN; or NEWS if nothing was sent, since servers came or left, and the Transfer is to be made anew.
        """
        after = RunDecision([])
        is_background = self.report.is_background
        if is_background:
            keep_for_this_stream((*self.sources, *self.targets))
        with self.in_step("the reports before the run"):
            begun = time.perf_counter()
            decision = self.agree()
            agreed = time.perf_counter()
            runs = not decision.is_news and not decision.unfit
            problems = decision.problems or (self._prepare(decision) if runs else [])
            self._seconds |= {"agree": agreed - begun, "plan": time.perf_counter() - agreed}
            if not problems and runs:
                self._exchange(decision, (lambda: self._note_changes(sent)) if is_background else sent)
                if decision.is_background or self._transfer.agreement.levels:
                    after = self._problems_after()
                    if after.problems and decision.is_background and self._transfer.options.changes:
                        self._transfer.needs_whole = True  # what a sender kept and what it sent may be of two moments
            self._begins_again = bool(decision.is_news or decision.unfit or after.unfit)
        self.raise_if_any(problems)
        if after.problems:
            what, advice = "what came is of two moments", "Wait until sent(), or run with snapshot=True."
            if self._transfer.agreement.levels:
                what = "what came isn't in use everywhere"
                advice = "What that function, and those of later stages there, haven't written is as before; run again."
            said = "; ".join(after.problems)
            raise ValueError(f"{self._called} ran, and {what}: {said}. {advice}") from self._raised
        unfit = {**decision.unfit, **after.unfit}
        if unfit:
            said = with_paths("; ".join(by_sentence(unfit)), self._transfer.agreement.paths)
            raise Unfit(f"{self._called} goes on without servers that can't run: {said}.", unfit) from self._raised
        return NEWS if decision.is_news else RAN

    @contextmanager
    def in_step(self, text: str) -> Iterator[None]:
        """Begin with a step of this name, in which all ranks come together, and end the run. An error in the block is
        one of the whole Transfer: it fails on all ranks."""
        watch = self.group.watch
        if watch is not None and not watch.begin(text, waits=True):
            raise self._error(watch.advice)
        try:
            yield
            if self._begins_again:
                self.group.enter("making it anew", False)
            else:
                self.group.end_run()
        except Exception as error:
            raise self._failed(error) from error

    def agree(self) -> RunDecision:
        """Hear the reports of all ranks. Collective."""
        decision = self.report.agree(self.group.team, self._trainers)
        version = self.report.version if decision.version is None else decision.version
        self._called = name_of(self._transfer.ranks, version)
        self.group.enter("planning", True)
        return decision

    def raise_if_any(self, problems: Sequence[str]) -> None:
        """Raise why ranks can't run, if some can't; the same on all ranks."""
        if problems:
            text = "; ".join(problems).removesuffix(".")
            hint = " It runs with the shapes, types and placements that it was made for, the same tensors on all ranks."
            raise ValueError(
                f"{self._called} can't run, and nothing was sent: {with_paths(text, self._transfer.agreement.paths)}."
                f"{hint if 'when the Transfer was made' in text else ''}"
            )

    def _prepare(self, decision: RunDecision) -> list[str]:
        """Compare replicas where that is asked for, and plan names that no run had before. Returns why that can't be,
        in words. Collective."""
        transfer, report = self._transfer, self.report
        several = transfer.agreement.multi_mesh
        problems: list[str] = []
        if report.checks or decision.are_ties_apart or not several.isdisjoint(report.only or several):
            problems = self.replica_problems(report.checks, decision.are_ties_apart)
        if not problems and report.only not in transfer.plans.by_names:
            try:
                transfer.plans.add(report.only, self.indices, self.sources, self.shared, self._is_snapshot)
            except ValueError as error:  # on all ranks
                problems = [str(error).removesuffix(".")]
        return problems

    def replica_problems(self, are_all_asked: bool, are_ties_apart: bool) -> list[str]:
        """Compare the replicas of the sources. See `replica_problems_now`. Collective."""
        transfer = self._transfer
        return replica_problems_now(
            self.group.team, transfer.agreement, transfer.sources, self.sources, are_all_asked, are_ties_apart
        )

    def _exchange(self, decision: RunDecision, sent: Callable[[], None]) -> None:
        """Run the exchanges of the plan, and raise the version counters of the targets that were written, also if a
        part of them was written before an error."""
        transfer = self._transfer
        plan, rank = transfer.plans.by_names[self.report.only], self.group.team.rank
        keeps = transfer.options.keep and not self._has_copies  # views of copies would keep the copies' memory
        own = [self.sources[index] for index in plan.indices], [self.targets[index] for index in plan.indices]
        try:
            if transfer.options.changes:
                self._send_whole_where_needed(plan, decision.need_whole)
                transfer.needs_whole = True  # as long as not all of it has come
            progress = None if transfer.progress is None else Progress(transfer.progress, plan.bytes_of(rank))
            landed = nothing if progress is None else progress.add
            plan.exchanges.run(*own, Going(sent, keeps, self.group.watch, self.state, landed))
            if progress is not None:
                progress.end()
        except (Torn, KeyboardInterrupt, SystemExit):
            self._bump_versions(plan)
            raise
        self._bump_versions(plan)
        self._is_exchanged = True
        if plan.turns.error is not None:
            self._raised, self._problems_beside = plan.turns.error, [*self._problems_beside, plan.turns.problem]
            plan.turns.error = None  # its traceback holds what the function had
        transfer.wrote |= memory_of_targets(transfer, self.indices, self.targets)
        transfer.needs_whole = False
        transfer.version, ran = decision.version, plan.exchanges
        seconds = {**self._seconds, **ran.seconds}
        transfer.stats = RunStats(decision.version, seconds, ran.count, ran.sent_bytes, ran.received_bytes)
        logger.info("%s: %s", self._called.rstrip(","), transfer.stats)
        if transfer.options.changes:
            transfer.changed = ran.changed
            logger.debug("%s: %s of %s elements changed", self._called.rstrip(","), *transfer.changed)

    def _send_whole_where_needed(self, plan: Plan, need_whole: frozenset[int]) -> None:
        """Have the exchanges send everything whole where a receiver may not have what was sent last: to ranks that say
        so, to all ranks in a run with `check`, and, in the next runs of all other plans that move some of the same
        names, to everybody."""
        transfer = self._transfer
        names = None if self.report.only is None else {*self.report.only}
        if names is not None:  # with those of targets that lie in one block with these
            names.update(*[tied for tied in transfer.agreement.tied if not names.isdisjoint(tied)])
        for only, other in transfer.plans.by_names.items():
            other.exchanges.send_whole_next(transfer.ranks if self.report.checks else need_whole)
            if other is not plan and (names is None or only is None or not names.isdisjoint(only)):
                other.exchanges.send_whole_next()

    def _bump_versions(self, plan: Plan) -> None:
        """Raise the version counters of the targets that were written: a backward of what was computed from them before
        raises then, as after `copy_`.

        This comes after the sources' versions were read for the last time. Views of one storage share a counter, so a
        run in the background that writes beside its sources would take them for changed by the program.
        """
        written = plan.exchanges.written

        def find() -> list[torch.Tensor]:
            targets = [self._transfer.targets[plan.indices[place]] for place in written]
            return [tensor for target in targets if target is not None for tensor in target.counting]

        torch.autograd.graph.increment_version(find() if self.state is None else self.state.written(written, find))

    def _note_changes(self, sent: Callable[[], None]) -> None:
        """Note which sources were changed in place, or got other memory, while they were read. Then call `sent`."""
        device = self._transfer.device
        if device.type != "cpu":
            # The kernels that read are only launched. A change in the meantime would go unseen.
            torch.accelerator.current_stream(device).synchronize()
        for tensor, versions, memory in self._versions:
            if tensor.versions != versions:
                self._problems_beside.append(tensor.changed_text)
            elif tensor.memory != memory:
                self._problems_beside.append(tensor.moved_text)
        sent()

    @property
    def _trainers(self) -> int | None:
        place = self._transfer.agreement.place
        return None if place is None or place.fleet is None else place.fleet.trainers

    def _problems_after(self) -> RunDecision:
        """Say what the programs of all ranks changed while a run in the background went on, and which functions of
        stages failed, in words. Collective."""
        if self.report.is_background:
            self._problems_beside += [tensor.moved_text for tensor, memory in self._homes if tensor.memory != memory]
        self.group.enter("saying what went wrong beside the exchanges", True)
        return RunReport(self._problems_beside).agree(self.group.team, self._trainers)

    def _failed(self, error: Exception) -> TransferFailed:
        """Return the error to raise for an error in a run: it says whether targets were written, and who is missing. If
        the Transfer has a watch, this first agrees on that with the other ranks, which takes some seconds
        (`Watch.settle`)."""
        said = f"{str(error).removesuffix('.')}."
        watch = self.group.watch
        if watch is not None:
            # An error in a step that waits comes from another rank, whose connection broke.
            watch.settle(error, is_own=not watch.position.waits)
            said = watch.advice
            # A sender that has heard all reports takes what it sends for sent, also if this rank didn't hear them.
            self._transfer.needs_whole |= watch.has_reached(2, watch.ranks)
        return self._error(said, isinstance(error, Torn))

    def _error(self, said: str, is_torn: bool = False) -> TransferFailed:
        """Return the error of a run that failed."""
        state = "no target was written"
        if is_torn:
            state = "some targets are new and others not, or half so"
        elif self._is_exchanged:
            state = "all targets of this rank were written"
        watch = self.group.watch
        gone, failed = ((), ()) if watch is None else (watch.gone, watch.failed)
        said = f"{self._called} failed, and {state}: {said}"
        return TransferFailed(said, gone, is_torn or self._is_exchanged, failed)
