"""`Transfer`: many tensors from one mesh to another, planned once and run often. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from .distributed._mesh.text import of_ranks
from .show.words import aligned, counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from .rendezvous.meeting import Place
    from .transfers.runs import Running
    from .transfers.trees import Names

BUDGET = 256 << 20  # bytes
SHOWN = 32  # ranks, in print


def checked_timeout(timeout: Any) -> timedelta:
    """Return what a user gave as `timeout=`, in seconds or as a timedelta, as a timedelta.

    Raises:
        ValueError: it is neither, or not above 0.

    >>> checked_timeout(2.5)
    datetime.timedelta(seconds=2, microseconds=500000)
    """
    try:
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        if isinstance(limit, timedelta) and limit > timedelta():
            return limit
    except (ValueError, OverflowError):  # not a number, or infinite
        pass
    raise ValueError(f"timeout= takes a number of seconds above 0, or a timedelta; got {timeout!r}.")


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
        timeout: how long a rank waits for others in one step of a run, in seconds or as a timedelta. After that, all
            ranks that are there raise an error that names those that aren't. By default the timeout of the world, or of
            the place. The same on all ranks.
        changes: send only the elements whose bits differ from what was sent in the last run, as positions and values.
            Each sender keeps what it sent: as much memory as all that it sends, on the tensors' device, or in the
            host's memory with "cpu". The same on all ranks.
        relay: send each element from the sources once, however many ranks want it: those that want the same get a
            stripe each and pass it on among themselves. For many replicas and few sources. The same on all ranks.
        host: with `relay`, a name for the machine on which this rank is. Ranks with the same name pass elements on
            among themselves, and each element crosses to a machine once. Nothing is assumed of a rank without one.

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
        relay: bool = False,
        host: str | None = None,
    ) -> None:
        from .overlay import require_recognised
        from .transfers.exchanges import log_plan
        from .transfers.runner import TransferRunner

        require_recognised()
        limit = None if timeout is None else checked_timeout(timeout)
        if not isinstance(budget, (int, float)) and not hasattr(budget, "__index__"):
            raise TypeError(f"budget= takes a whole number of bytes; got {budget!r}.")
        budget = int(budget)
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise TypeError(
                f"names= takes a dict from paths of the source to paths of the target, or a function; got {names!r}."
            )
        self.budget = budget
        if changes not in (True, False, "cpu"):
            raise ValueError(f'changes= takes True, False or "cpu"; got {changes!r}.')
        if host is not None and not (relay and isinstance(host, str)):
            raise ValueError(f"host= takes a name, and relay=True beside it; got {host!r} with relay={relay!r}.")
        self._runner = TransferRunner(
            source, target, budget, group, names, gone, strict, keep, limit, changes, bool(relay), host
        )
        log_plan("transfer_plan", lambda: str(self))

    @property
    def exchanges(self) -> int:
        """How many exchanges a run takes; 0 on a rank that has no part in it."""
        return self._runner.exchange_count

    @property
    def staging(self) -> int:
        """The most bytes that a run of all tensors has in buffers on this rank; 0 on a rank that has no part in it.
        Copies of sources aren't counted. A run with `only` may have more, up to the budget."""
        return self._runner.staging

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """The names that only one side has, and that aren't moved, under "source" and "target"."""
        return self._runner.left_out

    @property
    def version(self) -> int | None:
        """The number that ranks gave as `run(version=)` in the last run; None if none did."""
        return self._runner.version

    @property
    def traffic(self) -> dict[int, tuple[int, int, int]]:
        """What a run of all tensors takes: for each rank of both sides the bytes that it sends, those that it gets, and
        how many exchanges it would need alone; `exchanges` is how many there are. With `changes`, as if everything went
        whole. Empty on a rank that has no part in the Transfer."""
        return self._runner.traffic

    @property
    def sent_bytes(self) -> int:
        """With `changes`: the bytes that this rank sent in the last run, of values and positions. Without it, 0: see
        `traffic`."""
        return self._runner.sent_bytes

    @property
    def changed(self) -> tuple[int, int]:
        """With `changes`: how many elements this rank sent in the last run, and of how many. Elements that go to
        several ranks count for each."""
        return self._runner.changed

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
                - `only` has a name that isn't moved, or ranks differ in `only`, `version` or `check`;
                - replicas differ, or the sources of targets that are one block of memory;
                - targets came to share memory, or a file of the checkpoint changed;
                - the budget is too small for these names, the snapshot, or copies of sources that targets overwrite;
                - a rank called `refuse`, or a run in the background failed and nobody called its `wait()`.

                After a run in the background it also means that a source was changed in place while it was read, as
                its version counter says, or that a tensor got other memory, as by `p.data = other`. Then the targets
                were written.
            TransferFailed: a rank failed, or didn't come within the timeout. Names the rank and the step, and says
                whether targets of this rank were written. The Transfer can't run again; the ranks that are left close
                it, and make another one with ``gone=error.gone``. It is a RuntimeError.
            RuntimeError: the Transfer is closed, or is running.
        """
        return self._runner.run(only, version, check, async_op, snapshot)

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
        return self._runner.refuse(why)

    def bind(self, source: Any = None, target: Any = None) -> None:
        """Use the tensors of these trees from now on, in place of those given before. A side that is None stays.

        Not collective: a rank calls it between two runs, and it waits for a run that still goes on. The tensors have
        the names, shapes, types, devices and placements of those before. On a rank that has no part in the Transfer it
        does nothing.

        Raises:
            ValueError: a tensor is missing, is one too many, or doesn't fit, or targets share memory; names it. Nothing
                was changed.
            TypeError: something in a tree is no tensor that can be moved. Nothing was changed.
            RuntimeError: the Transfer is closed.
        """
        self._runner.bind(source, target)

    def forget(self) -> None:
        """Free the buffers and views that ``keep=True`` keeps, and with them memory that the tensors gave up; and what
        `changes` keeps.

        Not collective. The next run makes them anew; with `changes` it sends everything from and to this rank.
        """
        self._runner.forget()

    def close(self) -> None:
        """Destroy the Transfer's process group, and let go of its tensors. Then `run`, `bind` and `refuse` raise a
        RuntimeError.

        Not collective: ranks that still run are told that this one has left. Waits for a run in another thread or in
        the background, and up to two seconds for a store that doesn't answer. Logs the error of a run in the background
        for which nobody called `wait`. A second call does nothing.
        """
        self._runner.close()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        sources, targets = self._runner.ends
        lines = [
            f"{self._runner.tensor_count} tensors from {of_ranks(sorted(sources))} to {of_ranks(sorted(targets))}, "
            f"budget {size_text(self.budget)}"
        ]
        if not self.traffic:
            return f"{lines[0]}; this rank has no part in it"
        lines.append(
            f"{counted(self.exchanges, 'exchange')}; buffers of {size_text(self.staging)} on this rank at most"
        )
        rows = [("rank", "sends", "gets")]
        rows += [(str(rank), size_text(out), size_text(into)) for rank, (out, into, _) in self.traffic.items()]
        more = [f"... {len(rows) - 1} ranks"] if rows[SHOWN + 1 :] else []
        return "\n".join([*lines, *aligned(rows[: SHOWN + 1], right=(0, 1, 2)), *more])
