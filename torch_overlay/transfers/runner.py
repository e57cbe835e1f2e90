"""Run a `Transfer`: the object behind it on one rank. Start at `TransferRunner.run`.

Making it is in `agreement.py` (what ranks agree on), `transfer_group.py` (their process group) and `transfer_plan.py`
(the exchanges). A run looks at the tensors of the moment, hears whether all ranks can run, and runs the exchanges of
its plan.
"""

from __future__ import annotations

import atexit
import logging
import os
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..distributed._mesh.text import of_ranks
from ..distributed._torch import span
from ..errors import TransferFailed
from ..show.words import counted
from ._planner.memory import NOTHING_SHARED, Shared
from .agreement import Options, agree
from .blocks import Buffers
from .bound_tensors import LastRun, bind_side, copies, locals_of, rebind_side, shared_memory
from .changes import ChangesOnly
from .descriptions import SIDES, shared_targets
from .exchanges import Torn
from .hops import Relayed
from .pieces import own_tensors
from .replicas import check_tied_entries, check_tied_targets, replica_problems_now
from .runs import Running, RunReport, checked_names, checked_version, keep_for_this_stream
from .transfer_group import TransferGroup, meeting_of
from .transfer_plan import Plans, bytes_for_buffers, flow_of
from .watch import CLOSED, ENDED, end_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from torch.distributed import ProcessGroup

    from ._planner.schedule import Flow
    from .blocks import Locals
    from .bound_tensors import BoundTensor
    from .descriptions import Tensor
    from .exchanges import Traffic
    from .meeting import Meeting, Place
    from .runs import Job
    from .team import Team
    from .transfer_plan import Plan
    from .trees import Names

logger = logging.getLogger(__name__)
_open: WeakSet[TransferRunner] = WeakSet()


class TransferRunner:
    """The object behind a `Transfer`, with the arguments and errors of `Transfer`. Making one is collective over the
    ranks of `group`.

    Attributes:
        tensor_count: how many tensors are moved by any rank.
        ends: the ranks of the source, and those of the target.
        ranks: those of both sides, ascending.
        left_out: for "source" and "target", the names that only this side has.
        version: what the sources gave as `version=` in the last run; None if they gave none.
        traffic: for each rank the bytes that it sends, the bytes that it gets, and the exchanges that it needs; empty
            on a rank that has no part in the Transfer.
        exchange_count: how many exchanges a run of all tensors has.
        staging: the most bytes that a run of all tensors has in buffers on this rank.
        sent_bytes, changed: as `Transfer` has them.
        process: the id of the process that made it.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        budget: int,
        group: ProcessGroup | Sequence[int] | Place | None,
        names: Names,
        gone: Sequence[int] = (),
        strict: bool = True,
        keep: bool = False,
        timeout: timedelta | None = None,
        changes: bool | str = False,
        relay: bool = False,
        host: str | None = None,
    ) -> None:
        options = Options(budget, group, names, gone, strict, keep, timeout, changes, relay, host)
        agreement, meeting, sides = agree(source, target, options)
        self._agreement = agreement
        self.tensor_count, self.ends, self.ranks = agreement.tensor_count, agreement.ends, agreement.ranks
        self.left_out = agreement.left_out
        self.version: int | None = None
        self._sources: list[BoundTensor | None] = []
        self._targets: list[BoundTensor | None] = []
        self._group: TransferGroup | None = None
        self._running, self._is_closed = Lock(), False
        self._last: Running | None = None  # the last run in the background
        self.process = os.getpid()
        # The names that were looked at last, where their tensors lay, and what memory they shared.
        self._seen: tuple[object, object, Shared] | None = None
        self.traffic: Traffic = {}
        self.exchange_count = self.staging = 0
        self._names, self._keeps, self._changes = names, keep, changes
        self._needs_whole = False  # whether this rank needs everything whole, since it lacks what `changes` builds on
        self._wrote: dict[int, object] = {}  # by index of the move, where the last run left its target
        self.sent_bytes, self.changed = 0, (0, 0)
        self._last_runs: dict[tuple[str, ...] | None, LastRun] = {}  # by the names that were moved
        self._device = torch.device(agreement.device_type)
        if not self.tensor_count:
            return
        self._sources, self._targets = (
            bind_side(side, given, agreement.moves, agreement.place) for side, given in zip(SIDES, sides)
        )
        self._device = _device_of([*self._sources, *self._targets], agreement.device_type)
        if agreement.tied:
            self._check_tied(meeting_of(group, agreement.gone))
        _open.add(self)
        self._make(meeting)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that are moved, in order of name; where planners planned, those in pieces of which this rank has
        a part."""
        return self._agreement.tensors

    def _check_tied(self, meeting: Meeting) -> None:
        """Check that targets which are one block of memory get equal values. Collective, unless the source is a
        checkpoint."""
        agreement = self._agreement
        if agreement.contents is not None:
            check_tied_entries(agreement.tied, agreement.tensors, agreement.contents)
            return
        locals_, _ = locals_of(self._sources, range(len(agreement.moves)))
        check_tied_targets(meeting, agreement.tied, self._sources, locals_, agreement.moves)

    def _make(self, meeting: Meeting) -> None:
        """Make the process group and the plan of all tensors, and set `traffic`, `exchange_count` and `staging`.
        Collective. A rank outside both sides only helps to make the group, where the backend needs all ranks of the
        world for it."""
        agreement = self._agreement
        group = TransferGroup(agreement.place, self.ranks, self._device, agreement.device_type)
        if meeting.rank not in self.ranks:
            group.make(meeting)  # on a backend where the whole world has to take part
            return
        self._group = group
        group.start_watch(meeting)
        try:
            group.enter("making the process group", True)
            group.make(meeting)
            group.member.connect()
            group.enter("planning", False)
            self._buffers = Buffers(self._device)
            indices = range(len(agreement.moves))
            sources, source_problems = locals_of(self._sources, indices)
            targets, target_problems = locals_of(self._targets, indices)
            has_problems = bool(source_problems or target_problems)  # of which the first run tells
            shared = NOTHING_SHARED if has_problems else self._shared(None, indices, sources, targets)
            self._plans = Plans(agreement, group, self._buffers, self._changes)
            self._plans.add(None, indices, sources, shared)
        except RuntimeError as error:
            if group.watch is None:
                raise
            watch = group.watch
            said = watch.settle(error, is_own=False)
            group.end_watch()
            raise TransferFailed(f"A Transfer over {of_ranks(self.ranks)} can't be made: {said}", watch.gone) from error
        except Exception:  # as all ranks raise it
            group.end_watch()
            raise
        group.end_run()
        self.traffic, self.exchange_count = self._plans.traffic, self._plans.count
        self.staging = self._plans.by_names[None].exchanges.staging

    @property
    def _own_group(self) -> TransferGroup:
        """The process group of the Transfer."""
        if self._group is None:
            raise AssertionError("a rank that takes part has a group")
        return self._group

    @property
    def _member(self) -> Team:
        """This rank's `Team`. Only for a rank of `ranks`."""
        return self._own_group.member

    def bind(self, source: Any, target: Any) -> None:
        """Use the tensors of other trees from the next run on. Waits for a run in another thread. A rank that has no
        part in the Transfer ignores the trees."""
        with self._running:
            if self._is_closed:
                raise RuntimeError("This Transfer is closed, and its process group with it. Make another one.")
            if not self.traffic:
                return
            moves, place = self._agreement.moves, self._agreement.place
            before = self._sources, self._targets
            bound = [
                old if tree is None else rebind_side(side, own_tensors(tree, side, names), moves, place, old)
                for side, tree, names, old in zip(SIDES, (source, target), (self._names, None), before)
            ]
            locals_ = [[tensor and tensor.local for tensor in side] for side in bound]
            problems = self._memory_problems(shared_memory(range(len(moves)), *locals_, *bound))
            if problems:
                raise ValueError(f"The target to bind can't be written: {'; '.join(problems)}. Nothing was bound.")
            self._sources, self._targets = bound
            self._last_runs = {}

    def flow(self) -> Flow:
        """Compute what all ranks send to one another in a run of all tensors. Sends nothing."""
        return flow_of(self._agreement)

    def run(
        self, only: Iterable[str] | None, version: int | None, check: bool, async_op: bool, snapshot: bool
    ) -> Running | None:
        """Read the sources and write the targets. Collective over `ranks`. Arguments and errors are those of
        `Transfer.run`."""
        self._take_turn()
        begun = None
        try:
            job = self._begin(only, version, check, async_op, snapshot)
            if async_op:
                device = self._device if self.traffic else torch.device("cpu")
                begun = self._last = Running(job, self._running.release, device, is_sent=snapshot)
                return begun
            job(lambda: None)
        finally:
            if begun is None:
                self._running.release()
        return None

    def refuse(self, why: str) -> str:
        """Tell the other ranks, which call `run`, that this rank can't, so that all of them raise. See
        `Transfer.refuse`. Collective over `ranks`."""
        self._take_turn()
        try:
            if self.traffic:
                self._run(RunReport([why or "it refused"]), (), [], [], lambda: None, NOTHING_SHARED, False)
        except ValueError as error:
            return str(error)  # what all ranks raise
        finally:
            self._running.release()
        return ""

    def _take_turn(self) -> None:
        """Acquire `_running`, so that no other thread runs or closes the Transfer until it is released."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError("This Transfer is running, and runs go one at a time. Wait for that one to end.")
        if self._is_closed:
            self._running.release()
            raise RuntimeError("This Transfer is closed, and its process group with it. Make another one.")

    def _begin(
        self, only: Iterable[str] | None, version: int | None, check: bool, async_op: bool, snapshot: bool
    ) -> Job:
        """Read and check this rank's tensors, before the run talks to other ranks. With `snapshot`, and where a target
        would overwrite a source before it is read, the sources are copied here.

        Nothing raises here: what is wrong goes into this rank's report, so that all ranks raise it. If only this rank
        raised, the others would wait for it until the timeout.
        """
        if not self.traffic:
            return lambda sent: None
        last, self._last = self._last, None
        if last is not None:
            last.precede()
        # From here on nothing may raise: problems are collected.
        names, problems = checked_names(only)
        version, version_problems = checked_version(version)
        indices, unknown = self._agreement.indices_of(names)
        problems += [*version_problems, *unknown, *(last.unheard() if last is not None else [])]
        # Taken out, so that a run that fails leaves no state behind.
        state = self._last_runs.pop(names, None)
        if state is not None and not problems and state.is_unchanged():
            sources, targets, shared = state.sources, state.targets, state.shared
        else:
            state = None  # it holds memory that the program's tensors gave up since
            sources, source_problems = locals_of(self._sources, indices)
            targets, target_problems = locals_of(self._targets, indices)
            problems += [*source_problems, *target_problems]
            shared = NOTHING_SHARED if problems else self._shared(names, indices, sources, targets)
            problems += self._memory_problems(shared)
            if self._keeps and self._agreement.contents is None and not problems:
                tensors = [side[index] for side in (self._sources, self._targets) for index in indices]
                state = LastRun(tensors, sources, targets, shared)
        problems += [] if self._agreement.files is None else self._agreement.files.changes()
        are_ties_apart = not problems and self._are_ties_apart(names, indices, sources)
        if state is not None:
            self._last_runs[names] = state
        plan = self._plans.by_names.get(names)
        # The first run of some names plans them later, with what the copies leave of the budget.
        staging = 0 if plan is None else plan.exchanges.staging
        if snapshot:
            sources, too_large = copies(sources, self._agreement.budget - staging, indices, "a snapshot")
            problems += too_large
        elif shared.overwritten:
            read = indices if plan is None else {indices[place] for place in plan.exchanges.reads}
            why = "copying this rank's sources that its targets overwrite"
            copied = shared.overwritten.keys() & read
            sources, too_large = copies(sources, self._agreement.budget - staging, copied, why)
            problems += too_large
        has_copies = snapshot or bool(shared.overwritten)
        if self._keeps:
            for_buffers = self.staging if plan is None else staging
            self._buffers.keep(for_buffers if has_copies else bytes_for_buffers(self._agreement))
        watched = indices if async_op and not snapshot else ()
        read_tensors = [tensor for tensor in map(self._sources.__getitem__, watched) if tensor is not None]
        versions = [(tensor, tensor.versions) for tensor in read_tensors]
        memory = self._memory_of(indices, targets)
        needs_whole = self._needs_whole or any(
            self._wrote.get(index, where) != where for index, where in memory.items()
        )
        report = RunReport(problems, names, version, check, async_op, needs_whole, are_ties_apart)

        def job(sent: Callable[[], None]) -> None:
            """Run, and call `sent` when no source is read any more."""
            changed: list[str] = []

            def sources_are_read() -> None:
                """Note which sources were changed in place while they were read, then call `sent`. A run in the
                background on a GPU first waits until the GPU has read them."""
                if async_op and self._device.type != "cpu":
                    # The kernels that read are only launched. A change in the meantime would go unseen.
                    torch.accelerator.current_stream(self._device).synchronize()
                changed.extend([tensor.changed_text for tensor, before in versions if tensor.versions != before])
                sent()

            if async_op:
                keep_for_this_stream((*sources, *targets))
            with span(f"Transfer of {counted(len(indices), 'tensor')}"):
                is_background = self._run(
                    report, indices, sources, targets, sources_are_read, shared, has_copies, state, snapshot
                )
            if is_background:
                self._check_unchanged(changed)

        return job

    def _check_unchanged(self, problems: Sequence[str]) -> None:
        """Check that no rank's program changed a source while a run in the background read it. Collective."""
        group = self._own_group
        try:
            group.enter("comparing the sources' versions after the run", True)
            changed = RunReport(problems).agree(self._member).problems
        except Exception as error:
            raise self._failed(error) from error
        group.end_run()
        if changed:
            raise ValueError(
                f"A Transfer over {of_ranks(self.ranks)} ran, and what came is of two moments: {'; '.join(changed)}. "
                "Wait until sent(), or run with snapshot=True."
            )

    # Tensors made in inference mode can be written in inference mode only, others in either. No tensor made here stays.
    @torch.inference_mode()
    def _run(
        self,
        report: RunReport,
        indices: Sequence[int],
        sources: Locals,
        targets: Locals,
        sent: Callable[[], None],
        shared: Shared,
        has_copies: bool,
        state: LastRun | None = None,
        is_snapshot: bool = False,
    ) -> bool:
        """Hear the reports of all ranks, plan these names if no run did before, and run the exchanges. Collective over
        `ranks`."""
        problems: list[str] = []
        group = self._own_group
        if group.watch is not None and not group.watch.begin("the reports before the run", waits=True):
            raise self._error(False, group.watch.advice)
        try:
            problems, version, is_background, need_whole, are_ties_apart = report.agree(self._member)
            group.enter("planning", True)
            multi_mesh = self._agreement.multi_mesh
            has_several_meshes = not multi_mesh.isdisjoint(report.only or multi_mesh)
            if not problems and (report.checks or has_several_meshes or are_ties_apart):
                problems = self._replica_problems(sources, report.checks, are_ties_apart)
            if not problems and report.only not in self._plans.by_names:
                try:
                    self._plans.add(report.only, indices, sources, shared, is_snapshot)
                except ValueError as error:  # on all ranks
                    problems = [str(error).removesuffix(".")]
            if not problems:
                self._run_exchanges(report, sources, targets, sent, has_copies, state, need_whole)
                self._wrote |= self._memory_of(indices, targets)
                self.version = version
        except Exception as error:
            raise self._failed(error) from error
        if problems:
            group.end_run()
            text = "; ".join(problems).removesuffix(".")
            hint = " It runs with the shapes, types and placements that it was made for, the same tensors on all ranks."
            raise ValueError(
                f"A Transfer over {of_ranks(self.ranks)} can't run, and nothing was sent: {text}."
                f"{hint if 'when the Transfer was made' in text else ''}"
            )
        if not is_background:
            group.end_run()
        return is_background

    def _run_exchanges(
        self,
        report: RunReport,
        sources: Locals,
        targets: Locals,
        sent: Callable[[], None],
        has_copies: bool,
        state: LastRun | None,
        need_whole: frozenset[int],
    ) -> None:
        """Run the exchanges of the plan, and raise the version counters of the targets that were written, also if a
        part of them was written before an error."""
        plan = self._plans.by_names[report.only]
        exchanges = plan.exchanges
        sends_changes = isinstance(exchanges, (ChangesOnly, Relayed)) and bool(self._changes)
        keeps = self._keeps and not has_copies  # views of copies would keep the copies' memory
        own = [sources[index] for index in plan.indices], [targets[index] for index in plan.indices]
        try:
            if sends_changes:
                self._send_whole_where_needed(report, exchanges, need_whole)  # type: ignore[arg-type]
            exchanges.run(*own, sent, keeps, self._own_group.watch, state)
            if sends_changes:
                self._note_sent(exchanges)  # type: ignore[arg-type]
        except Torn:
            self._bump_versions(plan, state)
            raise
        self._bump_versions(plan, state)

    def _memory_of(self, indices: Sequence[int], targets: Locals) -> dict[int, object]:
        """Return where the targets lie and how often they were written, by index of the move.

        If that differs from what the last run left, the program may have overwritten what that run brought, and changes
        alone would leave the target wrong.
        """
        if not self._changes:
            return {}
        memory: dict[int, object] = {}
        for index in indices:
            tensor, local = self._targets[index], targets[index]
            if tensor is not None and local is not None:
                # While there is a weak reference to a storage, no other storage gets its id.
                storage = StorageWeakRef(local.untyped_storage())
                versions = tensor.versions
                counted = object() if None in versions else versions
                memory[index] = storage, local.data_ptr(), local.shape, local.stride(), counted
        return memory

    def _send_whole_where_needed(
        self, report: RunReport, exchanges: ChangesOnly | Relayed, need_whole: frozenset[int]
    ) -> None:
        """Have the exchanges send everything whole where a receiver may not have what was sent last: to ranks that say
        so, to all ranks in a run with `check`, and, in the next runs of all other plans that move some of the same
        names, to everybody."""
        names = None if report.only is None else {*report.only}
        for only, (_, other) in self._plans.by_names.items():
            if isinstance(other, (ChangesOnly, Relayed)):
                other.send_whole_next(self._member.ranks if report.checks else need_whole)
                if other is not exchanges and (names is None or only is None or not names.isdisjoint(only)):
                    other.send_whole_next()
        if self._needs_whole and self._member.rank in need_whole:
            self._needs_whole = False

    def _note_sent(self, exchanges: ChangesOnly | Relayed) -> None:
        """Set `sent_bytes` and `changed` from a run that sent only changes, and log them."""
        self.sent_bytes, self.changed = exchanges.sent_bytes, exchanges.changed
        logger.debug(
            "A Transfer over %s: this rank sent %s bytes, %s of %s elements changed",
            *(of_ranks(self.ranks), self.sent_bytes, *self.changed),
        )

    def _bump_versions(self, plan: Plan, state: LastRun | None) -> None:
        """Raise the version counters of the targets that the last run of a plan wrote: a backward of what was computed
        from them before raises then, as after `copy_`.

        This comes after the sources' versions were read for the last time. Views of one storage share a counter, so a
        run in the background that writes beside its sources would take them for changed by the program.
        """
        indices, exchanges = plan

        def find() -> list[torch.Tensor]:
            """Return the tensors of the targets that were written."""
            targets = [self._targets[indices[place]] for place in exchanges.written]
            return [tensor for target in targets if target is not None for tensor in target.counting]

        torch.autograd.graph.increment_version(find() if state is None else state.written(exchanges.written, find))

    def _failed(self, error: Exception) -> TransferFailed:
        """Return the error to raise for an error in a run: it says whether targets were written, and who is missing. If
        the Transfer has a watch, this first agrees on that with the other ranks, which takes some seconds
        (`Watch.settle`)."""
        said = f"{str(error).removesuffix('.')}."
        watch = self._own_group.watch
        if watch is not None:
            # An error in a step that waits comes from another rank, whose connection broke.
            watch.settle(error, is_own=not watch.position.waits)
            said = watch.advice
        return self._error(isinstance(error, Torn), said)

    def _error(self, is_written: bool, said: str) -> TransferFailed:
        """Return the error of a run that failed."""
        state = "some targets are new and others not, or half so" if is_written else "no target was written"
        watch = self._own_group.watch
        gone = () if watch is None else watch.gone
        return TransferFailed(f"A Transfer over {of_ranks(self.ranks)} failed, and {state}: {said}", gone, is_written)

    def _are_ties_apart(self, only: tuple[str, ...] | None, indices: Sequence[int], sources: Locals) -> bool:
        """True if targets of several names are one block of memory, and this rank's sources of these names are not, so
        that their values may differ."""
        agreement = self._agreement
        if not agreement.tied or agreement.contents is not None:
            return False
        held: dict[str, set[object]] = {name: set() for names in agreement.tied for name in names}
        for index in indices:
            name, tensor, local = agreement.moves[index].tensor.name, self._sources[index], sources[index]
            if name in held and tensor is not None and local is not None:
                part = tensor.part(local)
                # Its type, its box of the whole tensor, and the memory; nothing if the box is empty.
                held[name].update([] if part is None else [part[1:]])
        groups = [[name for name in names if only is None or name in only] for names in agreement.tied]
        return any(len({frozenset(held[name]) for name in names}) > 1 for names in groups)

    def _replica_problems(self, sources: Locals, are_all_asked: bool, are_ties_apart: bool) -> list[str]:
        """Compare the replicas of these sources, and return what differs, in words, the same on all ranks. Collective.
        See `replica_problems_now`, also for the last two arguments."""
        agreement = self._agreement
        return replica_problems_now(
            self._member,
            agreement.tensors,
            agreement.tied,
            self._sources,
            sources,
            agreement.moves,
            agreement.multi_mesh,
            are_all_asked,
            are_ties_apart,
        )

    def _shared(
        self, names: tuple[str, ...] | None, indices: Sequence[int], sources: Locals, targets: Locals
    ) -> Shared:
        """Find out which of these tensors share memory on this rank.

        The last answer is remembered, and holds while each tensor lies where it lay, so that a run of the same tensors
        compares their addresses and not the memory of every pair.
        """
        sides = self._sources, self._targets
        locations = [tensor and tensor.location for side in sides for tensor in map(side.__getitem__, indices)]
        if self._seen is None or self._seen[:2] != (names, locations):
            self._seen = names, locations, shared_memory(indices, sources, targets, *sides)
        return self._seen[2]

    def _memory_problems(self, shared: Shared) -> list[str]:
        """Say for which targets a write would spoil another target, and which of them became one block of memory since
        the Transfer was made, in words. Empty if nothing is wrong."""
        return shared_targets(shared) + [
            f"the targets {', '.join(map(repr, names))} became one block of memory since this Transfer was made"
            for names in shared.tied
            if names not in self._agreement.tied
        ]

    def forget(self) -> None:
        """Free the buffers and what `keep` and `changes` keep. With `changes` everything goes whole from and to this
        rank in the next run. Waits for a run in another thread. Does nothing once the Transfer is closed."""
        with self._running:
            if self.traffic and not self._is_closed:
                self._buffers.forget()
                self._last_runs = {}
                for plan in self._plans.by_names.values():
                    plan.exchanges.forget()
                self._needs_whole = bool(self._changes)

    def close(self) -> None:
        """Destroy the process group, and let go of all tensors. Waits for a run in another thread. Logs the error of a
        last run for which nobody waited. A second call does nothing."""
        with self._running:
            self._log_unheard()
            self._close()

    def _log_unheard(self) -> None:
        """Log the error of the last run in the background, if it failed and nobody called its `wait`."""
        for problem in self._last.unheard() if self._last is not None else ():
            logger.error("A Transfer over %s: %s", of_ranks(self.ranks), problem)

    def end(self) -> None:
        """Close the Transfer at the end of the program, and log the error of a last run for which nobody waited. Raises
        nothing.

        A run that still goes on, on a thread for which the interpreter doesn't wait, is left alone. A Transfer of
        tensors on a GPU isn't closed.
        """
        if self._is_closed or not self._running.acquire(blocking=False):
            return
        try:
            self._log_unheard()
            if self._device.type == "cpu":
                self._close(ENDED)
        except Exception:
            logger.debug("A Transfer over %s wasn't closed at the end", of_ranks(self.ranks), exc_info=True)
        finally:
            self._running.release()

    def _close(self, why: str = CLOSED) -> None:
        """Do what `close` says."""
        if self._group is not None:
            self._group.close(why)
        if self.traffic:
            self._buffers.forget()
            self._plans.by_names.clear()
        # From now on no method may use the group, and the garbage collector may end the group of a place.
        self._is_closed = True
        self._sources, self._targets = [], []
        self._last, self._last_runs = None, {}


def _device_of(tensors: Iterable[BoundTensor | None], device_type: str) -> torch.device:
    """Return the device of the first tensor that is on a device of this type; without one, the current device of it."""
    devices = [tensor.device for tensor in tensors if tensor is not None]
    return next((device for device in devices if device.type == device_type), torch.device(device_type))


@atexit.register
def _close_all() -> None:
    """Close the Transfers that the program left open. Called when the interpreter ends, after it has waited for runs in
    the background.

    A thread of gloo's still holds the tensors of its last collective.
    """
    for runner in [*_open]:
        if runner.process == os.getpid():  # a forked child has no threads to join
            runner.end()
    end_threads()
