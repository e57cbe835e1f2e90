"""`Transfer`: many tensors from one mesh to another, planned once and run often. Importing this imports no torch.

`transfers/making.py` makes one, and `transfers/run.py` is a run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakSet

from .distributed._mesh.text import of_ranks
from .show.words import aligned, counted, size_text
from .transfers.options import BUDGET, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from .rendezvous.fleet import Gone
    from .rendezvous.place import Place
    from .transfers._planner.schedule import Flow
    from .transfers.background import Running
    from .transfers.pieces import Given
    from .transfers.run import TransferState
    from .transfers.servers import Servers
    from .transfers.stats import RunStats
    from .transfers.trees import Names


SHOWN = 32  # ranks, in print
CLOSED = "This Transfer is closed, and its process group with it. Make another one."
FORKED = "This Transfer belongs to the process that made it: a fork has its connections, and no threads. Use it there."
logger = logging.getLogger("torch_overlay.transfers")
_open: WeakSet[Transfer] = WeakSet()


class Transfer:
    """Copies the tensors of one tree into those of another, on the same ranks or on others. Planned once, run often.

        sync = torch_overlay.Transfer(trainer.state_dict(), generator.state_dict(), budget=256 << 20)
        sync.run()  # every step, into the generator's tensors

    Both trees are nested dicts, lists and tuples of tensors; tensors with the same path belong together. A rank gives
    None for a tensor, or for a whole side, that it has no part in. Ranks of the source's meshes send, and ranks of the
    target's meshes receive. A plain tensor is a replica on each rank that gives it. A `piece`, or a tuple of pieces, is
    a part of a larger tensor. The source may be a `checkpoint`. Targets may be views, but for conjugate, negative
    and expanded ones. Among float64, float32, float16 and bfloat16, values are cast to the target's type as by `copy_`;
    the narrower type travels.

    Making a Transfer is collective over `group`. It compares what the ranks give, and plans. A Transfer has a process
    group of its own over the ranks of both sides, until `close` or the end of a `with`, and `run` is collective over
    these ranks. The trees are read once. A run reads and writes what their DTensors hold when it begins.

    Each element goes once to each rank that lacks it, from one of those that have it, in as few exchanges as the budget
    allows. Targets may lie in the memory of sources: what would be overwritten before it is read is copied first. A
    source with a pending reduction is an error: `redistribute` it on its mesh first.

    Args:
        source: the tensors to read. A rank that gives None in place of a checkpoint reads no files.
        target: the tensors to write.
        budget: the bytes that buffers and copies may take on a rank. If ranks give different budgets, all use the
            smallest.
        group: the ranks that make the Transfer, which include those of both sides: a process group, a list of ranks, or
            a place where several worlds met (`meet`). By default all ranks of the world.
        gone: ranks that have left, and send nothing. The other ranks make the Transfer.
        names: maps a path of the source to the path of the target, or to a tuple of several paths: a function, or a
            dict of the paths that differ.
        strict: whether a path that only one side has is an error. If False, it is `left_out`.
        keep: keep the buffers (on the CPU, within the budget) and the views of the tensors for the next run. With many
            small tensors a run then takes a fraction of the CPU time. Memory that a tensor gave up, because it was
            offloaded or replaced, is free at the next run, or after `forget` or `close`. The same on all ranks.
        timeout: how long a rank waits for others in one step of a run in which no bytes move, in seconds or as a
            timedelta. After that, all ranks that are there raise an error that names those that aren't. By default the
            timeout of the world, or of the place. The same on all ranks.
        changes: send only the elements whose bits differ from what was sent in the last run, as positions and values.
            Each sender keeps what it sent: as much memory as all that it sends, on the tensors' device, or in the
            host's memory with "cpu". The same on all ranks.
        relay: whether ranks that want the same get a stripe each and pass it on among themselves, so that each element
            leaves the sources once and crosses to a machine once. By default they do where the busiest machine's link
            then has fewer bytes; with `changes`, in the runs in which it does. The same on all ranks.
        progress: called in runs on this rank, at most each half second and at the end, with the bytes that it has sent
            and got and those of the whole run: ``progress(done, all)``. In the background it is called on the run's
            thread. With `changes`, bytes count as if everything went whole. An error in it is logged.
        at_least: at an open place, how many servers have to be there after a run. With fewer, trainers raise when the
            run has been finished with those that are left.
        stages: on a receiver, pairs of several names of the target and a function. These tensors, which the target has
            on meta, come one group after the other into memory that is freed again: when a group has come, its
            function is called with a dict of them by name, while the next group is under way. A DTensor or a tensor is
            given as it is, a piece as its tensor, pieces as a tuple of tensors; views of one tensor are views of one
            tensor again. Two groups have memory at one time, beside the budget; with `relay` up to four, and more
            where ranks give groups in different orders. A group takes the whole storage of each of its tensors. With
            `changes` all keep it, and functions get copies. At an open place a function may be called again in one run,
            if another server is dropped.
        host: a name for the machine on which this rank is. By default ``NCCL_HOSTID``, or the host's name and boot id.

    Attributes:
        budget: as this rank gave it.
        exchanges: how many exchanges a run takes; 0 on a rank that has no part in it.
        staging: the most bytes that a run of all tensors has in buffers on this rank; 0 on a rank that has no part in
            it. Copies of sources aren't counted. A run with `only` may have more, up to the budget.
        joined, gone: at an open place, the names of the servers that came in the last run, and those that were dropped,
            each with its ranks and why.
        left_out: the names that only one side has, and that aren't moved, under "source" and "target".
        staged: the names that come in stages on some rank.
        traffic: what a run of all tensors takes: for each rank of both sides the bytes that it sends, those that it
            gets, and how many exchanges it would need alone; `exchanges` is how many there are. With `changes`, as if
            everything went whole. Empty on a rank that has no part in the Transfer.

    Raises:
        ValueError: on every rank, with the names of the tensors: the sides don't fit, no rank gives anything, reading
            them failed on some rank, pieces of a source leave something out, targets share memory, or only ranks that
            are gone had some part. On every rank of the source and the target: the budget is too small. On this rank
            alone, before it talks to others: an option has a wrong value.
        TypeError: on this rank alone: `group` or `gone` is no list of ranks, `budget` no whole number, or `names`
            neither a dict nor a function.
        RuntimeError: a rank didn't come within the group's timeout; names it.
        UnknownRelease: there are no fingerprints of this torch release, and the overlay is off.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        *,
        budget: int = BUDGET,
        group: ProcessGroup | Sequence[int] | Place | None = None,
        names: Names = None,
        gone: Sequence[int] = (),
        strict: bool = True,
        keep: bool = False,
        timeout: float | timedelta | None = None,
        changes: bool | Literal["cpu"] = False,
        relay: bool | None = None,
        host: str | None = None,
        progress: Callable[[int, int], object] | None = None,
        at_least: int = 0,
        stages: Iterable[tuple[Iterable[str], Callable[[dict[str, Any]], object]]] = (),
    ) -> None:
        from .overlay import require_recognised

        require_recognised()
        options = Options.checked(budget, strict, keep, timeout, changes, relay, host)
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise TypeError(
                f"names= takes a dict from paths of the source to paths of the target, or a function; got {names!r}."
            )
        if not (progress is None or callable(progress)):
            raise TypeError(f"progress= takes a function of two numbers of bytes; got {progress!r}.")
        from .transfers.making import make
        from .transfers.stages import Stages

        grouped = Stages(stages) if (stages := [*stages]) else None
        self._running, self._is_closed, self._process = Lock(), False, os.getpid()
        self._runs_on: int | None = None  # a thread, while a run goes on there
        self._background: Running | None = None  # the last run in the background, which the next one has yet to see
        self._names, self._progress, self._at_least, self.budget = names, progress, at_least, options.budget
        self._trees: list[Any] = []  # at an open place: what the Transfer is made of anew
        self._servers: Servers | None = None
        self.joined: tuple[str, ...] = ()
        self.gone: tuple[Gone, ...] = ()
        fleet = getattr(group, "fleet", None)
        if fleet is None:
            self._adopt(make(source, target, group, names, gone, options, grouped))
        else:
            from .transfers.servers import Servers

            if fleet.is_used:
                raise ValueError("An open place has one Transfer at a time: close the one that there is.")
            place, trees = cast("Place", group), self._trees
            trees += [source, target]
            # Nothing here holds this Transfer: a closed one would keep its place's connection until a cycle is found.
            self._servers = Servers(
                place, fleet, lambda: make(trees[0], trees[1], place, names, gone, options, grouped)
            )
            self._adopt(self._servers.remake(None, {}))
            fleet.is_used = True
            self.joined, self.gone = fleet.take_news()
        _open.add(self)
        _close_at_end()

    def _adopt(self, state: TransferState) -> None:
        """Run by this state from now on."""
        from .transfers.exchanges import log_plan

        state.progress = self._progress
        self._state, self.left_out = state, state.agreement.left_out
        self.staged = tuple(state.agreement.levels)
        self.exchanges = self.staging = 0
        self.traffic: dict[int, tuple[int, int, int]] = {}
        if state.group is not None:
            plan = state.plans.by_names[None]
            self.traffic, self.exchanges, self.staging = plan.traffic, plan.exchanges.count, plan.exchanges.staging
        log_plan("transfer_plan", lambda: str(self))

    def _note_changes(self) -> None:
        """Set `joined` and `gone`, and raise if too few servers are left."""
        if self._servers is not None:
            fleet = self._servers.fleet
            self.joined, self.gone = fleet.take_news()
            if len(fleet.units) < self._at_least and self._servers.is_trainer:
                left = ", ".join(repr(unit.name) for unit in fleet.units) or "none"
                raise RuntimeError(
                    f"A Transfer with at_least={self._at_least} has these servers left: {left}. The run was finished "
                    "with them."
                )

    @property
    def version(self) -> int | None:
        """The number that ranks gave as `run(version=)` in the last run; None if none did."""
        return self._state.version

    @property
    def stats(self) -> RunStats | None:
        """What the last run took on this rank: seconds by what it did, bytes, exchanges. None before the first. Each
        run logs it at INFO, to the logger torch_overlay.transfers."""
        return self._state.stats

    @property
    def sent_bytes(self) -> int:
        """With `changes`: the bytes that this rank sent in the last run, of values and positions. Without it, 0: see
        `traffic`."""
        return 0 if self.stats is None or not self._state.options.changes else self.stats.sent_bytes

    @property
    def changed(self) -> tuple[int, int]:
        """With `changes`: how many elements this rank sent in the last run, and of how many. Elements that go to
        several ranks count for each."""
        return self._state.changed

    def run(
        self,
        *,
        only: Iterable[str] | None = None,
        version: int | None = None,
        check: bool = False,
        async_op: bool = False,
        snapshot: bool = False,
    ) -> Running | None:
        """Bring the sources' values into the targets. Collective over the ranks of both sides.

        Args:
            only: the target's names of the tensors to move, the same on all ranks. A set of names is planned when it is
                first given.
            version: a number, for instance the step. All ranks then have it as `version`. Ranks that give one give the
                same; those without sources may leave it out.
            check: compare the values of plain tensors and equal pieces that several ranks give, as when the Transfer
                was made, and of DTensors that are replicated along an axis. This reads all of them. With `changes`,
                also send everything, so that targets which somebody else wrote into are right again. The same on all
                ranks.
            async_op: run in the background, on a thread and on a GPU by a stream of its own, and return a handle. The
                targets are undefined until its `wait()` returns, which raises the run's errors. The sources are read
                until its `sent()` is true.
            snapshot: copy the sources first, so that they may change while the run goes on. The copies and the buffers
                have to fit the budget together.

        Returns:
            With `async_op` the handle of the run, whose `wait()` raises the errors below, except that the Transfer is
            closed or running. Else None, when the targets are written.

        Raises:
            ValueError: on all ranks, with the rank and the reason. Nothing was sent, and the next run can succeed:

                - a tensor changed its shape, type, device or placements, or lost its memory;
                - `only` has a name that isn't moved, or some names of a stage and not all;
                - ranks differ in `only`, `version` or `check`;
                - replicas differ, or the sources of targets that are one block of memory;
                - targets came to share memory, or a file of the checkpoint changed;
                - the budget is too small for these names, the snapshot, or copies of sources that targets overwrite;
                - a rank called `refuse`, or a run in the background failed and nobody called its `wait()`.

                After the run it means that a function of `stages` failed: no further one was called on that rank, and
                all other targets were written. After a run in the background it also means that a source was changed in
                place while it was read, as its version counter says, or that a tensor got other memory, as by
                `p.data = other`. Then the targets were written.
            TransferFailed: a rank failed, or didn't come within the timeout. Names the rank and the step, and says
                whether targets of this rank were written. The Transfer can't run again; the ranks that are left close
                it, and make another one with ``gone=error.gone``. It is a RuntimeError.
            RuntimeError: the Transfer is closed, or is running.
        """
        self._take_turn()
        begun = None
        try:
            job = self._begin(only, version, check, async_op, snapshot)
            if async_op:
                import torch

                from .transfers.background import Running

                device = self._state.device if self.traffic else torch.device("cpu")
                begun = self._background = Running(job, self._running.release, device, is_sent=snapshot)
                return begun
            job(lambda: None)
        finally:
            if begun is None:
                self._running.release()
        return None

    def _begin(
        self, only: Iterable[str] | None, version: int | None, check: bool, async_op: bool, snapshot: bool
    ) -> Callable[[Callable[[], None]], object]:
        """Check this rank's tensors for a run. Returns a function that does the run, and calls the function that it is
        given when no source is read any more."""
        unheard = self._after_last()
        if self._servers is None:
            return self._one_run(unheard, only, version, check, async_op, snapshot)
        only = _read_once(only)
        restore = self._hold_snapshot(only) if snapshot else lambda: None

        def again(sent: Callable[[], None]) -> str:
            return self._one_run(unheard, only, version, check, async_op, snapshot)(sent)

        def run(sent: Callable[[], None]) -> None:
            try:
                self._with_those_left(first, again)
                sent()
            finally:
                restore()

        try:
            first = self._one_run(unheard, only, version, check, async_op, snapshot)
        except BaseException:
            restore()
            raise
        return run

    def _hold_snapshot(self, only: Iterable[str] | None) -> Callable[[], None]:
        """At an open place: read copies of the sources, also where the Transfer is made anew, until what this returns
        is called. Where there is no room for them, the run says so."""
        from .transfers.bound_tensors import rebind_side
        from .transfers.pieces import copied_sources, own_tensors
        from .transfers.run import checked_names
        from .transfers.tensor_files import Checkpoint

        names, own = checked_names(only)[0], self._trees[0]

        def use(tree: Any, is_snapshot: bool) -> None:
            state = self._state
            if self.traffic and not state.is_stale:
                given = own_tensors(tree, "source", self._names)
                moves, place = state.agreement.moves, state.agreement.place
                state.sources = rebind_side("source", given, moves, place, state.sources)
                state.last_runs = {}
            self._trees[0], state.has_snapshot = tree, is_snapshot

        def restore() -> None:
            try:
                use(own, False)
            except (TypeError, ValueError):  # the program changed them meanwhile
                self._trees[0], self._state.is_stale, self._state.has_snapshot = own, True, False

        if own is None or isinstance(own, Checkpoint):
            return lambda: None
        try:
            some = None if names is None else frozenset(names)
            use(copied_sources(own, self._names, some, self._state.agreement.budget), True)
        except (TypeError, ValueError):
            return lambda: None
        return restore

    def _with_those_left(
        self,
        run: Callable[[Callable[[], None]], str],
        again: Callable[[Callable[[], None]], str],
        takes_in: bool = True,
    ) -> None:
        """Call `run`, and `again` each time that servers came or were lost. Sets `joined` and `gone`."""
        from .errors import TransferFailed
        from .transfers.run import NEWS, Unfit

        servers = cast("Servers", self._servers)
        servers.fleet.check_in()
        while True:
            lost: Mapping[int, str] = {}
            try:
                if run(lambda: None) != NEWS:  # it may be done again, and then reads the sources
                    break
            except (TransferFailed, Unfit) as error:
                if servers.is_left_out(self._state):
                    break
                lost = servers.lost(error)
            self._adopt(servers.remake(self._state, lost, takes_in))
            run = again
        self._note_changes()

    def _unheard(self) -> list[str]:
        """Return the error of the last run in the background, if it failed and nobody called its `wait`; only once."""
        last, self._background = self._background, None
        return [] if last is None else last.unheard()

    def _after_last(self) -> list[str]:
        """Let the current stream wait for the last run in the background. Returns what `_unheard` does."""
        if self._background is not None:
            self._background.precede()
        return self._unheard()

    def _one_run(
        self,
        unheard: list[str],
        only: Iterable[str] | None,
        version: int | None,
        check: bool,
        async_op: bool,
        snapshot: bool,
    ) -> Callable[[Callable[[], None]], str]:
        """Check this rank's tensors for a run. Returns a function that does the run, as `Run.go`."""
        from .distributed._torch import span
        from .transfers.run import NEWS, RAN, Run, RunReport, checked_names

        servers = self._servers
        if servers is not None and not servers.fleet.units:

            def without_servers(sent: Callable[[], None]) -> str:
                if servers.has_news(unheard):
                    return NEWS
                self._state.version = version
                sent()
                return RAN

            return without_servers
        if not self.traffic:
            return lambda sent: RAN
        with self._telling_interrupts():
            if self._state.is_stale:
                run = Run(
                    self._state, RunReport(unheard, *checked_names(only)[:1], version, check, async_op, is_news=True)
                )
            else:
                run = Run.check(self._state, only, unheard, version, check, async_op, snapshot)
            if async_op and not self._state.is_stale:
                run.hold()

        def job(sent: Callable[[], None]) -> str:
            self._runs_on = get_ident()
            try:
                with self._telling_interrupts(), span(f"Transfer of {counted(len(run.indices), 'tensor')}"):
                    return run.go(sent)
            finally:
                self._runs_on = None

        return job

    def _telling_interrupts(self) -> AbstractContextManager[None]:
        """Tell the other ranks at once if Ctrl-C ends the block."""
        return contextlib.nullcontext() if self._state.group is None else self._state.group.telling_interrupts()

    def _wait_for_turn(self) -> Lock:
        """Return `_running`, to wait for it; raise in a function that a run calls, which would wait for itself."""
        self._check_process()
        if self._runs_on == get_ident():
            raise RuntimeError(
                "A function of stages= or progress= can't close or bind its own Transfer, or let it forget: the run "
                "waits for the function. Do that after the run."
            )
        return self._running

    def _take_turn(self) -> None:
        """Acquire `_running`, so that no other thread runs or closes the Transfer until it is released."""
        self._check_process()
        if not self._running.acquire(blocking=False):
            raise RuntimeError("This Transfer is running, and runs go one at a time. Wait for that one to end.")
        if self._is_closed:
            self._running.release()
            raise RuntimeError(CLOSED)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(FORKED)

    def verify(self, *, only: Iterable[str] | None = None) -> None:
        """Compare what all targets hold with what their sources hold now, bit by bit and in the target's type. Call it
        in place of a run, before the sources change again. Collective over the ranks of both sides.

        Nothing is written, and no tensor is sent: ranks compute digests of the same elements, and compare these. Each
        target is compared with its source, also with `relay`; what stays on a rank is compared there; sources that are
        replicas of one another are compared, too. After a difference the Transfer can run again. Where a target's type
        differs from its source's, all NaN count as equal.

        Args:
            only: the target's names of the tensors to compare, the same on all ranks.

        Raises:
            ValueError: on all ranks: a target holds something else than its source. Names the first tensors, each with
                the rank and the box of the whole tensor, and how many elements differ where they are on one rank. Or
                ranks can't compare: as for `run`, and where targets lie in the memory of sources, or the source is a
                checkpoint.
            TransferFailed: a rank failed, or didn't come within the timeout.
            RuntimeError: the Transfer is closed, or is running.
        """
        from .transfers.run import RAN
        from .transfers.verification import verify

        only = _read_once(only)

        def run(_: object) -> str:
            if self.traffic:
                with self._telling_interrupts():
                    verify(self._state, only, unheard)
            return RAN

        self._take_turn()
        unheard = self._after_last()
        try:
            if self._servers is None:
                run(None)
            else:  # who comes meanwhile has nothing yet
                self._with_those_left(run, run, takes_in=False)
        finally:
            self._running.release()

    def refuse(self, why: str) -> str:
        """Call this in place of `run` on a rank that can't run, for instance because its training step failed.

        Then `run` is a ValueError on all other ranks, which names this rank and says why. Nothing was sent, and the
        next run can succeed.

        Returns:
            The message of that error, with the reasons of other ranks that refuse this run; "" on a rank that has no
            part in the Transfer.

        Raises:
            RuntimeError: the Transfer is closed, or is running; or a rank didn't come within the timeout.
        """
        from .transfers.run import NEWS, RAN, Run, RunReport

        servers = self._servers
        said = str(why or "") or "it refused"  # an error, too, which may have no words

        def run(_: object) -> str:
            if servers is not None and not servers.fleet.units:
                return NEWS if servers.has_news() else RAN
            return Run(self._state, RunReport([said])).go() if self.traffic else RAN

        self._take_turn()
        try:
            if servers is None:
                run(None)
            else:
                self._with_those_left(run, run)
        except ValueError as error:
            return str(error)  # what all ranks raise
        finally:
            self._running.release()
        return ""

    def bind(self, source: Any = None, target: Any = None) -> None:
        """Use the tensors of these trees from now on, in place of those given before. A side that is None stays.

        Not collective: a rank calls it between two runs, and it waits for a run that still goes on. The tensors have
        the names, shapes, types, devices and placements of those before; at an open place, they needn't: the next run
        then makes the Transfer anew. On a rank that has no part in the Transfer it does nothing.

        Raises:
            ValueError: a tensor is missing, is one too many, or doesn't fit, or targets share memory; names it. Nothing
                was changed. At an open place the next run raises it.
            TypeError: something in a tree is no tensor that can be moved. Nothing was changed.
            RuntimeError: the Transfer is closed.
        """
        from .transfers.bound_tensors import rebind_side, shared_memory
        from .transfers.descriptions import SIDES
        from .transfers.pieces import is_pieces, own_tensors
        from .transfers.run import memory_problems
        from .transfers.trees import leaves

        with self._wait_for_turn():
            if self._is_closed:
                raise RuntimeError(CLOSED)
            trees = [old if new is None else new for old, new in zip(self._trees, (source, target))]
            if not self.traffic:
                self._trees[:] = trees
                return
            moves, place = self._state.agreement.moves, self._state.agreement.place
            before, stages = (self._state.sources, self._state.targets), self._state.stages
            on_meta = () if stages is None else stages.by_name
            try:
                given: list[dict[str, Given] | None] = [
                    None if source is None else own_tensors(source, SIDES[0], self._names),
                    None if target is None else own_tensors(target, SIDES[1], on_meta=on_meta),
                ]
                bound = [
                    old if tensors is None else rebind_side(side, tensors, moves, place, old, stages)
                    for side, tensors, old in zip(SIDES, given, before)
                ]
                locals_ = [[tensor and tensor.local for tensor in side] for side in bound]
                problems = memory_problems(self._state, shared_memory(self._state.agreement.own, *locals_, *bound))
                if problems:
                    raise ValueError(f"The target to bind can't be written: {'; '.join(problems)}. Nothing was bound.")
            except ValueError:
                if self._servers is None:
                    raise
                self._trees[:], self._state.is_stale = trees, True
                return
            if target is not None and stages is not None:
                stages.see(leaves(target, is_pieces))
            if self._state.options.changes and target is not None:
                # Versions of another tensor may be what the last run left of the old one.
                pairs = zip(before[1], bound[1])
                self._state.needs_whole |= stages is not None or not all(
                    old is None or new is None or new.counts_as(old) for old, new in pairs
                )
            self._state.sources, self._state.targets = bound
            self._trees[:] = trees
            self._state.last_runs = {}

    def forget(self) -> None:
        """Free the buffers and views that ``keep=True`` keeps, and with them memory that the tensors gave up; and what
        `changes` keeps.

        Not collective. The next run makes them anew; with `changes` it sends everything from and to this rank.
        """
        with self._wait_for_turn():
            if self.traffic and not self._is_closed:
                self._state.buffers.forget()
                self._state.last_runs = {}
                for plan in self._state.plans.by_names.values():
                    plan.exchanges.forget()
                    plan.exchanges.send_whole_next()
                self._state.needs_whole = bool(self._state.options.changes)
                if self._state.stages is not None:
                    self._state.stages.free()

    def close(self) -> None:
        """Destroy the Transfer's process group, and let go of its tensors. Then `run`, `bind` and `refuse` raise a
        RuntimeError.

        Not collective: ranks that still run are told that this one has left. Waits for a run in another thread or in
        the background, and up to two seconds for a store that doesn't answer. Logs the error of a run in the background
        for which nobody called `wait`. A second call does nothing.
        """
        with self._wait_for_turn():
            self._log_unheard()
            self._close()

    def _log_unheard(self) -> None:
        for problem in self._unheard():
            logger.error("A Transfer over %s: %s", of_ranks(self._state.ranks), problem)

    def _close(self, is_end: bool = False) -> None:
        """Do what `close` says. With `is_end` other ranks hear that the program ended."""
        if self._state.group is not None:
            self._state.group.close(is_end)
        if self.traffic:
            self._state.buffers.forget()
            self._state.plans.by_names.clear()
            if self._state.stages is not None:
                self._state.stages.free()
        if self._servers is not None:
            self._servers.fleet.is_used = False
            self._servers.fleet.leave()
        # From now on no method may use the group, and the garbage collector may end the group of a place.
        self._is_closed = True
        self._state.sources, self._state.targets = [], []
        self._state.last_runs = {}

    def _end(self) -> None:
        """Close the Transfer at the end of the program. Raises nothing.

        A run that still goes on, on a thread for which the interpreter doesn't wait, is left alone. A Transfer of
        tensors on a GPU isn't closed.
        """
        if self._is_closed or not self._running.acquire(blocking=False):
            return
        try:
            self._log_unheard()
            if self._state.device.type == "cpu":
                self._close(is_end=True)
        except Exception:
            logger.debug("A Transfer over %s wasn't closed at the end", of_ranks(self._state.ranks), exc_info=True)
        finally:
            self._running.release()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        agreement = self._state.agreement
        sources, targets = agreement.ends
        lines = [
            f"{counted(len(agreement.tensors), 'tensor')} from {of_ranks(sorted(sources))} to "
            f"{of_ranks(sorted(targets))}, budget {size_text(self.budget)}"
        ]
        if not self.traffic:
            return f"{lines[0]}; this rank has no part in it"
        if agreement.why:
            lines.append(agreement.why)
        lines.append(
            f"{counted(self.exchanges, 'exchange')}; buffers of {size_text(self.staging)} on this rank at most"
        )
        if self.stats is not None:
            lines.append(f"last run: {self.stats}")
        rows = [("rank", "sends", "gets")]
        rows += [(str(rank), size_text(out), size_text(into)) for rank, (out, into, _) in self.traffic.items()]
        more = [f"... {len(rows) - 1} ranks"] if rows[SHOWN + 1 :] else []
        return "\n".join([*lines, *aligned(rows[: SHOWN + 1], right=(0, 1, 2)), *more])

    def _flow(self) -> Flow:
        """Compute what all ranks send to one another in a run of all tensors. Sends nothing."""
        from .transfers.transfer_plan import flow_of

        return flow_of(self._state.agreement)


def _read_once(only: Iterable[str] | None) -> Iterable[str] | None:
    """Return `only=` so that it can be read again: at an open place a run may begin several times."""
    return [*only] if isinstance(only, Iterator) else only


@functools.cache
def _close_at_end() -> None:
    # Registered with the first Transfer, after the handlers of torch and of places, so that it is called before them.
    atexit.register(_close_all)


def _close_all() -> None:
    """Close the Transfers that the program left open. Called when the interpreter ends, after it has waited for runs in
    the background.

    A thread of gloo's still holds the tensors of its last collective.
    """
    for transfer in [*_open]:
        if transfer._process == os.getpid():  # a forked child has no threads to join
            transfer._end()
    from .rendezvous.watch import end_threads

    end_threads()
