"""`Transfer`: many tensors from one mesh to another, planned once and run often. Importing this imports no torch."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from .distributed._mesh.text import of_ranks
from .show.words import aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from .transfers.current import Running
    from .transfers.descriptions import Names
    from .transfers.meeting import Place

BUDGET = 256 << 20  # bytes
SHOWN = 32  # ranks, in print


class Transfer:
    """The tensors of one tree, written into those of another, on the same ranks or on others.

        sync = torch_overlay.Transfer(trainer.state_dict(), generator.state_dict(), budget=256 << 20)
        sync.run()  # every step, into the generator's tensors

    Both trees are dicts, lists and tuples of tensors, nested as they come; tensors with the same path belong together.
    A rank gives the tensors that it has a part in, and None, for a tensor or for a whole side, where it has none: ranks
    of the source's meshes send, ranks of the target's receive, ranks of both do both. The targets may be any views. A
    plain tensor is a replica on each rank that gives it; a `piece`, or a tuple of pieces, is a part of a whole. The
    source may be a `checkpoint` in place of a tree. Of two types among float64, float32, float16 and bfloat16 the
    target's is what comes, cast as `copy_` does it; the narrower one travels.

    Making one is collective over `group` and plans everything; it compares what the ranks say of both sides. It has a
    process group of its own, over the ranks of both sides, until `close` or the end of a `with`. `run` is collective
    over those. The trees are read once: it reads and writes what these DTensors hold when it begins.

    Each element goes once to each rank that lacks it, from one of those that have it, in as few exchanges as the budget
    allows. A source with a pending reduction is refused: `redistribute` it on its mesh first.

    Targets may lie in the memory of sources. What a run would overwrite before it is read is copied first, within the
    budget.

    Args:
        source, target: what is read, and what is written. Of a checkpoint, a rank that gives None reads nothing.
        budget: the bytes that buffers and copies may take on a rank. If ranks give different ones, all use the least.
        group: whose ranks make the Transfer, those of both sides among them; a list of these ranks, or a place where
            several worlds met (`meet`). All ranks of the world if not given.
        gone: ranks that have left and send nothing; those who are there make the Transfer.
        names: from a path of the source to the path of the target that it goes to, or a tuple of several: a function,
            or a dict of those that differ.
        strict: whether a name that only one side has is an error; else it is `left_out`.
        keep: keep the buffers of a run for the next, on the CPU and within the budget, and the views of the tensors:
            a run of many small tensors then takes a fraction of the CPU time. What a tensor gave up (offloaded memory,
            a tensor that was replaced) is free at the next run, or after `forget` or `close`. The same on all ranks.
        timeout: for how long a rank waits for others in one step of a run, in seconds or as a timedelta. Then all
            ranks that are there raise an error that names those that aren't. That of the world, or of the place, if
            not given. The same on all ranks.
        changes: send only the elements whose bits differ from what was sent in the last run, as positions and values.
            Each sender keeps what it sent: as much memory as all that it sends, on the tensors' device, or in the
            host's memory with "cpu". The same on all ranks.
        relay: send each element from the sources once, however many ranks want it: those that want the same get a
            stripe each and pass it on among themselves. For many replicas and few sources. The same on all ranks.
        host: with `relay`, a name for the machine on which this rank is. Ranks with the same name pass elements on
            among themselves, and each element crosses to a machine once. Nothing is assumed of a rank without one.

    Raises:
        ValueError: the sides don't fit, reading them failed on some rank, pieces of a source leave something out,
            targets share memory that can't hold both, or ranks that are gone had what nobody else has, on every rank;
            names the tensors. Or the budget is too small.
        RuntimeError: a rank didn't come within the group's timeout; says which.
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
        from .transfers.route import Route

        require_recognised()
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        if limit is not None and limit <= timedelta():
            raise ValueError(f"timeout= takes a number of seconds above 0, or a timedelta; got {timeout!r}.")
        self.budget = budget
        if changes not in (True, False, "cpu"):
            raise ValueError(f'changes= takes True, False or "cpu"; got {changes!r}.')
        if host is not None and not (relay and isinstance(host, str)):
            raise ValueError(f"host= takes a name, and relay=True beside it; got {host!r} with relay={relay!r}.")
        self._route = Route(source, target, budget, group, names, gone, strict, keep, limit, changes, bool(relay), host)
        log_plan("transfer_plan", lambda: str(self))

    @property
    def exchanges(self) -> int:
        """How many exchanges a run takes; 0 on a rank that has no part in it."""
        return self._route.count

    @property
    def staging(self) -> int:
        """The most bytes that a run has in buffers on this rank."""
        return self._route.staging

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """By side, "source" and "target", the names that only this side has, and that aren't moved."""
        return self._route.left_out

    @property
    def version(self) -> int | None:
        """What the sources' ranks said with `run(version=)` in the last run; None if nobody did."""
        return self._route.version

    @property
    def traffic(self) -> dict[int, tuple[int, int, int]]:
        """By rank, the bytes that it sends, those that it gets, and the exchanges that it needs for them; empty on a
        rank that has no part in it."""
        return self._route.traffic

    @property
    def sent_bytes(self) -> int:
        """With `changes`: the bytes that this rank sent in the last run, of values and positions."""
        return self._route.sent_bytes

    @property
    def changed(self) -> tuple[int, int]:
        """With `changes`: how many elements this rank sent in the last run, and of how many. Elements that go to
        several ranks count for each."""
        return self._route.changed

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
            only: names of the tensors to move, as the target calls them, the same on all ranks; planned when it is
                first given.
            version: a whole number that a rank with sources says of them, its step for one; all ranks then have it as
                `version`.
            check: compare the values of plain tensors, and of pieces with one place, that several ranks give, as when
                the Transfer was made; reads all of them. With `changes` everything is sent, too, so that targets
                that somebody else wrote into are right again. The same on all ranks.
            async_op: go on in the background, and return what to `wait()` for: until then the targets are undefined,
                and until its `sent()` is true the sources are read. Errors come from `wait()`. On a thread, and on a
                GPU by a stream of its own.
            snapshot: send the sources' values of now, from copies that the budget has room for, so that they may
                change at once.

        Raises:
            ValueError: on all ranks, before anything is sent: a tensor of some rank changed its shape, type, device or
                placements, or lost its memory, ranks differ in `only`, `version` or `check`, or replicas differ; says
                on which ranks what. In the background: a source was changed in place meanwhile, as
                its version counter says.
            RuntimeError: the Transfer is closed, or is running; or a rank failed or didn't come within the timeout:
                names the rank and the step, and says whether targets of this rank were written. It can't run again;
                those who are left close it, and make another one with ``gone=``.
        """
        return self._route.run(only, version, check, async_op, snapshot)

    def refuse(self, why: str) -> None:
        """Say in place of `run` that this rank can't, since its step failed for example. The run of the others is a
        ValueError on all of them that names this rank and says why; nothing was sent, and the next run is as any.

        Raises:
            RuntimeError: the Transfer is closed, or is running; or a rank didn't come within the timeout.
        """
        self._route.refuse(why)

    def bind(self, source: Any = None, target: Any = None) -> None:
        """Take the tensors of these trees from now on, for those that were given before; a side that is None stays.

        Not collective: a rank does it for itself, between two runs. They have the names, shapes, types and placements
        of those before.

        Raises:
            ValueError: a tensor is missing or doesn't fit; names it. Nothing was bound.
        """
        self._route.bind(source, target)

    def forget(self) -> None:
        """Let go of the buffers and views that ``keep=True`` keeps, and with them of memory that the tensors gave up;
        and of what `changes` keeps.

        Not collective. The next run makes them anew; with `changes` it sends everything from and to this rank.
        """
        self._route.forget()

    def close(self) -> None:
        """Destroy the Transfer's process group, and let go of its tensors. Again does nothing."""
        self._route.close()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        sources, targets = self._route.ends
        lines = [
            f"{self._route.many} tensors from {of_ranks(sorted(sources))} to {of_ranks(sorted(targets))}, "
            f"budget {_amount(self.budget)}"
        ]
        if not self.traffic:
            return f"{lines[0]}; this rank has no part in it"
        lines.append(f"{self.exchanges} exchanges; buffers of {_amount(self.staging)} on this rank at most")
        rows = [("rank", "sends", "gets")]
        rows += [(str(rank), _amount(out), _amount(into)) for rank, (out, into, _) in self.traffic.items()]
        more = [f"... {len(rows) - 1} ranks"] if rows[SHOWN + 1 :] else []
        return "\n".join([*lines, *aligned(rows[: SHOWN + 1], right=(0, 1, 2)), *more])


def _amount(size: int) -> str:
    """Bytes for people.

    >>> _amount(1000), _amount(3 << 20)
    ('1000 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024  # type: ignore[assignment]
    return f"{size} B" if unit == "B" else f"{size:.1f} {unit}"
