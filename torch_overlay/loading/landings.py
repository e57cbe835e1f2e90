"""Landings: where a model's own loader puts each tensor of a checkpoint.

The loader runs on tensors without memory (on the meta device). `LoaderRun` records what it would copy to which places
of the model, which doesn't change. A tensor that the loader only slices, transposes, copies and casts lands in boxes
that we know then, whatever the loader's rules are: it is direct. A tensor that the loader computes with has to come
whole, and is handed to the loader after each run.

A record is trusted only if three things hold; else the tensor comes whole. Each operation is a view, a copy or a fill
with a constant that we know (`LoaderRun`). The loader does the same when it is asked a second time (`_Asking`). No two
tensors, and no tensor and a fill, go to one place (`conflicts`).

Start reading at `find_landings`.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..rendezvous.long_waits import said_if_long
from ..transfers.pieces import Piece
from ..transfers.stages import as_on_meta
from ..transfers.stats import Progress
from .attributes import PlainAttributes, Setting, compare_calls
from .loader_run import (
    NOBODY,
    Fill,
    LoaderRun,
    Meta,
    ModelMemory,
    Record,
    conflicts,
    extent,
    fills_of,
    joined,
    listed,
    named_tensors,
    storage_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from .attributes import Where

    Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
    Stage = tuple[list[str], Callable[[Mapping[str, Any]], None]]

logger = logging.getLogger(__name__)

SHARED = "another tensor goes to the same memory"
BESIDE = "another tensor of its module comes whole"
OTHERWISE = "its loader does otherwise when it is asked again"
READ = "its loader computes with what it wrote there"
UNSEEN = "its loader asks for a value, so that what it does with several tensors is unknown"


class Landings:
    """Where a loader puts tensors, as `torch_overlay.landings` found it.

    Attributes:
        direct: for each direct tensor, by name, its pieces on this rank. Each is a view of the model's own memory.
        whole: for each tensor that has to come whole, by name, the reason.
        skipped: names that the loader accepts and puts nowhere on this rank: experts of other ranks, a tied head.
        untouched: for each parameter or persistent buffer that isn't written completely, how many of its elements no
            tensor reaches. They would keep old values without an error.
        fills: memory that the loader sets to a constant, as `load_whole` does, too.
    """

    def __init__(
        self, load: Load, model: torch.nn.Module, tensors: Sequence[Meta], depends_on: Any, memory: ModelMemory
    ) -> None:
        self.direct: dict[str, tuple[Piece, ...]] = {}
        self.whole: dict[str, str] = {}
        self.skipped: tuple[str, ...] = ()
        self.untouched: dict[str, int] = {}
        self.fills: tuple[Fill, ...] = ()
        self._load, self._model, self._tensors = load, model, tuple(tensors)
        self._depends_on, self._depended = depends_on, _copied_state(depends_on)
        self._memory, self._buffers = memory, dict[str, torch.Tensor]()
        self._settings: tuple[Setting, ...] = ()
        self._goes_to: dict[str, set[int]] = {}  # storages, by name

    def target(self) -> dict[str, Any]:
        """Return the target of a `Transfer`: pieces for each direct tensor, and an empty tensor for each that comes
        whole. What goes to modules on meta is on meta, and needs ``stages=`` of the Transfer (`stages`).

        Skipped names aren't in it, so make the Transfer with ``strict=False``. The empty tensors are allocated once, on
        the device of the model's first parameter, and live as long as this object.
        """
        whole = {meta.name: meta for meta in self._tensors if meta.name in self.whole}
        staged = {name: whole[name].empty("meta") for name in self.staged if name in whole}
        own = whole.keys() - staged.keys()
        if own != self._buffers.keys():
            device = self._memory.device
            with torch.inference_mode(False):  # for the version counters, by which `load_whole` knows what came
                self._buffers = {name: meta.empty(device) for name, meta in whole.items() if name in own}
        return {**self._buffers, **staged, **self.direct}

    @property
    def staged(self) -> tuple[str, ...]:
        """The names that go to modules on meta, and come in `stages`; direct and whole ones."""
        return tuple([name for names, _ in self.groups for name in names])

    @cached_property
    def groups(self) -> list[tuple[list[str], dict[str, torch.nn.Module]]]:
        """The names that have to come together, and, by name, the modules on meta to which they go."""
        modules = [*self._model.named_modules()]
        homes = self._memory.homes_on_meta
        groups = _groups(homes, self._goes_to, self.whole)
        filled = set().union(*[homes.get(storage_of(fill.view), ()) for fill in self.fills])
        for _, own in groups[:1]:  # modules that get constants alone come with any names
            own |= filled.difference(*[others for _, others in groups])
        return [(names, {name: module for name, module in modules if name in own}) for names, own in groups]

    def stages(self, finish: Callable[[str, torch.nn.Module], object]) -> list[Stage]:
        """Return what ``Transfer(stages=)`` takes, for a model of which modules are on meta, in the layout that the
        loader loads into, while something else is served.

        When all tensors of a module have come, the module gets memory, with what the loader would have put there, and
        ``finish(name, module)`` is called, with the module's name in the model: it makes of the module's weights what
        is served. Then the module is on meta again. What comes whole is handed to the loader meanwhile, module by
        module. Elements that nothing reaches (`untouched`) are undefined.

        >>> import torch, torch_overlay
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(2, 3, bias=False)
        >>> def load(weights):
        ...     for _, weight in weights:
        ...         model.weight.data.copy_(weight)
        >>> served = torch.zeros(2, 3)  # transposed, for a kernel
        >>> found = torch_overlay.landings(load, model, {"w": torch.empty(3, 2, device="meta")})
        >>> stages = found.stages(lambda name, module: served.copy_(module.weight.T))
        >>> source, target = {"w": torch.ones(3, 2)}, found.target()
        >>> with torch_overlay.meet("tcp://127.0.0.1:29627", rank=0, world_size=1) as place:
        ...     with torch_overlay.Transfer(source, target, group=place, stages=stages) as sync:
        ...         sync.run()
        >>> served.sum(), model.weight.is_meta
        (tensor(6.), True)
        """
        return [(names, partial(self._finish, names, modules, finish)) for names, modules in self.groups]

    def _finish(
        self,
        names: Sequence[str],
        modules: Mapping[str, torch.nn.Module],
        finish: Callable[[str, torch.nn.Module], object],
        tensors: Mapping[str, Any],
    ) -> None:
        """Give modules what came, and call the user's function for each."""
        came: dict[int, torch.Tensor] = {}  # some view, by the storage on meta
        for name in names:
            if name in self.direct:
                came |= {storage_of(p._local_tensor): got for p, got in zip(self.direct[name], tensors[name])}
        device = next((each.device for name in names for each in tree_leaves(tensors[name])), self._memory.device)
        with self._memory.materialised(modules.values(), came, device) as real:
            for view, value in self.fills:
                if storage_of(view) in real:
                    as_on_meta(view, real[storage_of(view)]).fill_(value)
            whole = [(name, tensors[name]) for name in names if name in self.whole]
            if whole:
                self._load(whole)
            for name, module in modules.items():
                finish(name, module)

    def load_whole(self, copies: bool = False) -> None:
        """Hand the tensors that came whole to the loader, in one call, and set the constants that it sets besides: rows
        of padding, flags. The loader isn't called if nothing comes whole.

        Call it after each `Transfer.run` into `target()`.

        Args:
            copies: hand a copy of each tensor to the loader, made when the loader asks for it. A loader may change or
                keep what it gets, and the next run of a `Transfer` with `changes` needs what came last.

        Raises:
            ValueError: some tensors that come whole have never arrived; names them. Nothing was loaded.
            RuntimeError: `target()` wasn't called before. Whatever the loader raises is passed on.
        """
        if self.whole.keys() - {*self.staged} != self._buffers.keys():
            raise RuntimeError("Nothing came whole yet: give target() to a Transfer, run it, and then call load_whole.")
        missing = [name for name, tensor in self._buffers.items() if tensor.numel() and not tensor._version]
        if missing:
            raise ValueError(
                f"load_whole() needs all tensors that come whole, and {listed(missing)} never arrived, so that their "
                "memory holds no values. Nothing was loaded. Run the Transfer without only= once; and ask landings() "
                "for the tensors alone that the trainer sends (left_out of the Transfer has the others)."
            )
        with torch.no_grad():
            for view, value in self.fills:
                view.fill_(value)
            if self._buffers:
                self._load(_Copies(self._buffers) if copies else [*self._buffers.items()])
        for setting in self._settings:
            setting.apply()

    def stale(self) -> str | None:
        """Say why these landings don't hold any more, in words; None if they do. Then `again` asks the loader anew.

        Compares the model's names, shapes and types, the addresses of the memory that is written directly, and
        `depends_on`.

        >>> import torch, torch_overlay
        >>> model, order = torch.nn.Linear(2, 2, bias=False), [0, 1]
        >>> def load(weights):
        ...     for _, weight in weights:
        ...         for row, expert in enumerate(order):
        ...             model.weight.data[row].copy_(weight[expert])
        >>> found = torch_overlay.landings(load, model, {"w": torch.empty(2, 2, device="meta")}, depends_on=order)
        >>> found.stale()
        >>> order.reverse()
        >>> found.stale()
        'what they depend on has changed'
        """
        if not _same_state(_current_state(self._depends_on), self._depended):
            return "what they depend on has changed"
        direct = {storage_of(piece._local_tensor) for pieces in self.direct.values() for piece in pieces}
        return self._memory.change(self._model, direct | {storage_of(view) for view, _ in self.fills})

    def again(self) -> Landings:
        """Ask the same loader for the same tensors again, and return the new landings. From then on use their
        `target()`, not that of this object. Raises as `torch_overlay.landings`."""
        return find_landings(self._load, self._model, self._tensors, self._depends_on)

    def as_data(self) -> dict[str, Any]:
        """Return the landings as JSON-compatible data, for programs that plan transfers themselves.

        For each box of a direct tensor: its `start` and `shape` in the tensor, the `parameter` that it goes to, and
        `offset` and `strides` (one for each dim of the box) there, in elements from the parameter's first.
        """
        places = self._memory.places
        direct = {
            name: [
                {
                    "start": list(piece.start),
                    **_place(piece._local_tensor, places),
                    "dtype": _dtype_name(piece._local_tensor),
                }
                for piece in pieces
            ]
            for name, pieces in self.direct.items()
        }
        return {
            "tensors": {meta.name: [str(meta.dtype)[6:], list(meta.shape)] for meta in self._tensors},
            "direct": direct,
            "whole": dict(self.whole),
            "skipped": list(self.skipped),
            "untouched": dict(self.untouched),
            "fills": [{**_place(view, places), "value": value} for view, value in self.fills],
        }

    @property
    def tensors(self) -> tuple[Meta, ...]:
        """The tensors that the loader was asked for, in the order given."""
        return self._tensors

    def loaded(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The parameters and buffers of a module in the loader's layout, as they were when it was asked."""
        return self._memory.tensors_of(module)

    def storages_of(self, *names: str) -> set[int]:
        """The storages of the model (see `storages`) to which these tensors go, or may go."""
        return set().union(*[self._goes_to.get(name, ()) for name in names])

    def nbytes(self, kind: str) -> int:
        """Return how many bytes of the model are written directly ("direct"), or how many come whole ("whole").

        Args:
            kind: one of the two words. Any other counts as "whole".
        """
        if kind == "direct":
            return sum([piece._local_tensor.nbytes for pieces in self.direct.values() for piece in pieces])
        return sum([meta.nbytes for meta in self._tensors if meta.name in self.whole])

    def __str__(self) -> str:
        said = [
            f"{len(self.direct)} of {len(self._tensors)} tensors ({self.nbytes('direct')} bytes) go straight into the "
            f"model; {len(self.whole)} ({self.nbytes('whole')} bytes) come whole; {len(self.skipped)} go nowhere here"
        ]
        reasons: dict[str, list[str]] = {}
        for name, why in self.whole.items():
            reasons.setdefault(why, []).append(name)
        said += [f"whole, {why}: {listed(names)}" for why, names in reasons.items()]
        said += [f"untouched: {listed(list(self.untouched))}"] if self.untouched else []
        return "\n".join(said)


class _Copies:
    """Pairs of a name and a copy of a tensor, which is made when somebody asks for it.

    Who goes over them again gets the same copy, as from a list, if somebody holds it or has changed it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = [*tensors.items()]
        self._copies: dict[int, weakref.ref[torch.Tensor]] = {}
        self._changed: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> tuple[str, torch.Tensor]:
        name, tensor = self._tensors[at]
        at %= len(self)
        if self._last is not None and self._last._version:
            self._changed.append(self._last)
        copy = self._copies[at]() if at in self._copies else None
        if copy is None:
            with torch.inference_mode(False):  # for a version counter
                copy = tensor.clone()
        self._copies[at], self._last = weakref.ref(copy), copy
        return name, copy


def metas_of(tensors: Any) -> list[Meta]:
    """Return the names, types and shapes of tensors."""
    found: dict[str, Meta] = {}
    entries: Iterable[Any] = tensors.items() if isinstance(tensors, Mapping) else tensors
    for entry in entries:
        name, tensor = (entry.name, entry) if hasattr(entry, "name") else entry
        if not isinstance(name, str) or not isinstance(getattr(tensor, "dtype", None), torch.dtype):
            raise TypeError(
                f"landings() needs tensors by name, on meta for example; got {name!r}, a {type(tensor).__name__}."
            )
        if name in found:
            raise ValueError(f"Two tensors are called {name!r}; the loader couldn't tell them apart.")
        found[name] = Meta(name, tensor.dtype, tuple(tensor.shape))
    return [*found.values()]


def find_landings(
    load: Load,
    model: torch.nn.Module,
    tensors: Any,
    depends_on: Any = None,
    *,
    progress: Callable[[int, int], object] | None = None,
    unreliable: Mapping[int, str] | None = None,
    when_refused: Callable[[str], object] | None = None,
) -> Landings:
    """Do what `torch_overlay.landings` does, with two more arguments for integrations that know their server."""
    metas = metas_of(tensors)
    sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if sharded:
        raise TypeError(
            f"The parameters {listed(sharded)} of the model are DTensors, which say where they lie: give them to a "
            "Transfer as they are. landings() asks loaders of plain parameters."
        )
    memory = ModelMemory(model)
    words = f"asking the loader of {type(model).__name__} where it puts {len(metas)} tensors"
    with said_if_long(words), PlainAttributes(model, load) as attributes:
        told = None if progress is None else _TakenTensors(progress, 2 * len(metas))
        asking = _Asking(load, memory, attributes, told)
        for apart in (False, True):
            asked = asking.ask(metas, apart)
            if asked.refused is not None:
                if when_refused is None:
                    raise ValueError(
                        f"landings() needs a loader that takes all {len(metas)} tensors, and that of "
                        f"{type(model).__name__} {asked.refused}. Leave out what this model doesn't have, or give it "
                        "the name that it has in a checkpoint."
                    )
                when_refused(asked.refused)
            records = asked.records
            asking.settle(records, set(unreliable or ()), unreliable or {})
            left = asking.rehearse(metas, records)
            if NOBODY not in records or records[NOBODY].why is None:
                break
            # A fill lies in memory of a module of which something comes whole. Asked for one tensor at a time, the
            # loader shows which tensor the fill belongs to.
        settings = asking.settings(metas, records, left)
        if told is not None:
            told.end()
    found = Landings(load, model, metas, depends_on, memory)
    for meta in metas:
        record = records[meta.name]
        if record.why is not None:
            found.whole[meta.name] = record.why
        elif record.pieces:
            found.direct[meta.name] = tuple([Piece(view, meta.shape, start) for start, view in record.pieces])
    found._goes_to = _goes_to(metas, records)
    fills = [fill for record in records.values() if record.why is None for fill in record.fills]
    found.fills, found._settings = tuple(_distinct(fills)), settings
    found.skipped = tuple([meta.name for meta in metas if not {meta.name} & (found.direct.keys() | found.whole.keys())])
    found.untouched = _untouched(model, records)
    return found


def all_whole(load: Load, model: torch.nn.Module, tensors: Any, why: str) -> Landings:
    """Return landings in which every tensor comes whole. The loader isn't asked."""
    memory, metas = ModelMemory(model), metas_of(tensors)
    found = Landings(load, model, metas, None, memory)
    found.whole = {meta.name: why for meta in metas}
    found._goes_to = dict.fromkeys(found.whole, memory.storages)
    return found


class _TakenTensors(Progress):
    """Counts the tensors that a loader takes, over all of its calls, and tells a function of the user.

    >>> taken = _TakenTensors(lambda done, size: print(done, size), 2)
    >>> taken.counted(dict, 2)([("a", 1), ("b", 2)])
    1 2
    2 2
    {'a': 1, 'b': 2}
    """

    def __init__(self, call: Callable[[int, int], object], total: int) -> None:
        super().__init__(self._tell, total)
        self._users: Callable[[int, int], object] | None = call

    def _tell(self, done: int, size: int) -> None:
        """Tell the user's function. Of its error text is logged and no exception: that has the frames of the loader,
        and if a handler kept it, the loader would seem to keep the tensors in these."""
        try:
            if self._users is not None:
                self._users(done, size)
        except Exception:
            self._users = None
            logger.warning("progress= of landings() raised, and isn't called any more:\n%s", traceback.format_exc())

    def counted(self, load: Load, tensors: int) -> Load:
        """The loader, for a call with so many tensors."""
        self._total = max(self._total, self._done + tensors)
        return lambda weights: load(_Counted(weights, self))


class _Counted(list[Any]):
    """A list that counts what is taken from it. It holds nothing longer than a list does: `LoaderRun` looks at what the
    loader has kept."""

    def __init__(self, items: Iterable[Any], taken: _TakenTensors) -> None:
        super().__init__(items)
        self._taken = taken

    def __iter__(self) -> Iterator[Any]:
        return map(self._count, super().__iter__())

    def _count(self, item: Any) -> Any:
        self._taken.add(1)
        return item


class _Asked(NamedTuple):
    """What a loader answered.

    Attributes:
        records: by name; all of `tensors`, and `NOBODY` if all were asked for in one call.
        refused: which tensors the loader refuses also together with all others, in words; None if it takes them.
    """

    records: dict[str, Record]
    refused: str | None


class _Asking:
    """Asks a loader what it does with tensors.

    Attributes:
        reads: storages of the model that the loader has read in any call.
    """

    def __init__(
        self, load: Load, memory: ModelMemory, attributes: PlainAttributes, progress: _TakenTensors | None = None
    ) -> None:
        self._load, self._memory, self._attributes = load, memory, attributes
        self._progress = progress
        self._before = attributes.read(lambda tensor: False)
        self._full_runs: list[LoaderRun] = []  # calls with all names that the loader took
        self._values: dict[Where, Any] = {}  # of the attributes, after the first of these
        self.reads: set[int] = set()

    def run(
        self,
        metas: Sequence[Meta],
        apart: bool = False,
        is_full: bool = False,
        calls: Sequence[Sequence[Meta]] | None = None,
    ) -> LoaderRun:
        load = self._load if calls is None else _in_calls(self._load, [len(call) for call in calls])
        if self._progress is not None:
            load = self._progress.counted(load, len(metas))
        run = LoaderRun(load, self._memory, metas, apart, None if apart else self._attributes)
        self.reads |= run.reads
        if is_full and run.error is None:
            if not self._full_runs:
                self._values = self._attributes.values()
            self._full_runs.append(run)
        return run

    def ask(self, metas: Sequence[Meta], apart: bool) -> _Asked:
        """Ask for all tensors in one call, twice.

        A tensor with which the loader does otherwise alone than with others comes whole: a loader that makes one weight
        of two shows nothing of it where it gets one.
        """
        together = self.run(metas, is_full=True)
        if together.is_clear and not apart:
            return _Asked(_confirmed(together.records, self.run(metas, is_full=True)), None)
        alone = {meta.name: self.run([meta], apart=True) for meta in metas}
        records = {name: run.records[name] for name, run in alone.items()}
        needs_values = {name for name, run in alone.items() if run.error is not None and run.needs_values}
        refused = [name for name, run in alone.items() if run.error is not None and not run.needs_values]
        for name in [*needs_values, *refused]:
            # The loader stopped half way, so what else it would have written is unknown.
            records[name].written |= self._memory.storages
        if together.error is None:
            _take_together(records, refused, together)
            return _Asked(_confirmed(records, together), None)
        rest = together
        if needs_values:
            rest = self.run([meta for meta in metas if meta.name not in needs_values])
        if rest.error is None or not refused or (needs_values and together.needs_values):
            # With a value it might do anything with the others, too: nothing on meta can tell.
            for record in records.values():
                record.comes_whole(UNSEEN)
            return _Asked(records, None)
        return _Asked(records, self._refusal(metas, refused, needs_values, together.error))

    def _refusal(
        self, metas: Sequence[Meta], refused: Sequence[str], needs_values: Collection[str], error: Exception | None
    ) -> str:
        """Say which tensors the loader refuses: of those that it refuses alone, those that it also refuses together
        with all that it accepts."""
        out = []
        for name in refused[:64] if len(refused) < len(metas) else ():
            others = {*refused, *needs_values} - {name}
            run = self.run([meta for meta in metas if meta.name not in others])
            if run.error is not None:
                out.append(name)
                error = run.error
        return f"refuses {listed(out or refused)}, with {type(error).__name__}: {error}"

    def rehearse(self, metas: Sequence[Meta], records: dict[str, Record]) -> dict[Where, Any] | None:
        """Run the loader as `Landings.stages` and `load_whole` will, with the tensors that come whole and without the
        others, and mark more of `records` as whole."""
        while True:
            calls = self._calls(metas, records)
            if not calls:
                return self._before
            if len(calls[0]) == len(metas):
                return None
            some = [meta for call in calls for meta in call]
            run = self.run(some, calls=calls)
            if run.error is not None or not self._does_as_with_all(some, run):
                for meta in metas:
                    records[meta.name].comes_whole("its loader does otherwise without the others")
                    records[meta.name].written |= self._memory.storages  # so they come in one stage
                return None
            written = set().union(*[record.storages for record in run.records.values()])
            before = _count_whole(records)
            self.settle(records, written & self._memory.storages, {})
            if before == _count_whole(records):
                return run.left

    def _calls(self, metas: Sequence[Meta], records: Mapping[str, Record]) -> list[list[Meta]]:
        """Return which tensors come whole together: those of each stage, and the others."""
        whole = [meta for meta in metas if records[meta.name].why is not None]
        homes = self._memory.homes_on_meta
        groups = _groups(homes, _goes_to(metas, records), [meta.name for meta in whole])
        number = {name: at for at, (names, _) in enumerate(groups) for name in names}
        calls: dict[int, list[Meta]] = {}
        for meta in whole:
            calls.setdefault(number.get(meta.name, len(groups)), []).append(meta)
        return [calls[at] for at in sorted(calls)]

    def _does_as_with_all(self, some: Sequence[Meta], run: LoaderRun) -> bool:
        """True if the loader did with some tensors what it does with them in a call with all names."""
        if not self._full_runs:
            return False
        records, full = run.records, self._full_runs[-1].records
        is_known = {*records[NOBODY].did} <= {*full[NOBODY].did}
        return is_known and all(records[meta.name].did == full[meta.name].did for meta in some)

    def settle(self, records: dict[str, Record], written: set[int], why: Mapping[int, str]) -> None:
        """Mark more tensors as whole, until the direct ones are independent of them.

        A direct tensor must not share a storage with an unknown write or with a conflict (`conflicts`). Its storage
        must not be read by the loader, which would make a cache of the old weight. And it must not go to a module of
        which something comes whole: vLLM reloads whole modules, and would lose what was written directly.
        """
        read = self.reads & set().union(*[record.storages for record in records.values()])
        written = written | conflicts(records) | read
        reason = {**dict.fromkeys(written, SHARED), **dict.fromkeys(read, READ), **why}
        while True:
            for record in records.values():
                if record.why is not None:
                    written |= record.storages
            grown = written | self._memory.siblings(written)
            more = [record for record in records.values() if record.why is None and record.storages & grown]
            if not more:
                return
            for record in more:
                touched = [storage for storage in record.storages if storage in reason]
                record.comes_whole(reason[touched[0]] if touched else BESIDE)
            written = grown

    def settings(
        self, metas: Sequence[Meta], records: dict[str, Record], left: dict[Where, Any] | None
    ) -> tuple[Setting, ...]:
        """Return the attributes that `Landings.load_whole` has to set, since its call of the loader doesn't.

        If there are some that only a call with all names can set, all tensors come whole.
        """
        if left is None or not self._full_runs:
            return ()
        while len(self._full_runs) < 2:
            if self.run(metas, is_full=True).error is not None:
                return ()
        first, second = self._full_runs[:2]
        to_set, unknown = compare_calls(first.left, second.left, left)
        if unknown:
            for record in records.values():
                record.comes_whole(f"its loader sets {self._attributes.name(unknown[0])!r} anew in each call")
            return ()
        return tuple([self._attributes.setting(where, self._values) for where in to_set])


def _in_calls(load: Load, counts: Sequence[int]) -> Load:
    """A loader that gives another one so many tensors in each call."""

    def loads(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = iter(weights)
        for count in counts:
            load([*islice(pairs, count)])

    return loads


def _goes_to(metas: Sequence[Meta], records: Mapping[str, Record]) -> dict[str, set[int]]:
    """Return, by name, to which storages goes what a `Transfer` brings. Of some tensors the loader makes zeros."""
    its = {meta.name: records[meta.name] for meta in metas}
    return {name: record.storages for name, record in its.items() if record.pieces or record.why is not None}


def _groups(
    homes: Mapping[int, Collection[str]], goes_to: Mapping[str, set[int]], whole: Collection[str]
) -> list[tuple[list[str], set[str]]]:
    """Return the names that have to come together in a stage, in order, and those of their modules (`homes`)."""
    every: dict[str, set[Any]] = {}
    for name, its in goes_to.items():
        # Of a tensor that comes whole and was put nowhere, nothing is known: it may go anywhere.
        places = its or (set(homes) if name in whole else set())
        every[name] = set().union(*[homes.get(each, ()) for each in places])
        if name in whole:
            every[name] |= places  # where another one may come whole, too: the last one's values stay
    order = {name: at for at, name in enumerate(goes_to)}
    groups = [(names, {each for each in own if isinstance(each, str)}) for names, own in joined(every)]
    return [(sorted(names, key=order.__getitem__), own) for names, own in groups if own]


def _take_together(records: dict[str, Record], refused: Sequence[str], together: LoaderRun) -> None:
    """Replace in `records` those of tensors that are refused alone by what was seen in the call with all others."""
    others = [record for name, record in records.items() if name not in refused]
    nobody = together.records[NOBODY]
    written = nobody.written.difference(*[record.written for record in others])
    fills = fills_of(nobody).difference(*[fills_of(record) for record in others])
    written |= {extent.storage for extent, _ in fills}
    for name in refused:
        records[name] = together.records[name]
        if written:
            records[name].comes_whole("its loader writes what can't be told from others'")
            records[name].written |= written


def _confirmed(records: dict[str, Record], again: LoaderRun) -> dict[str, Record]:
    """Mark as whole the tensors with which the loader does something else in a second run. Changes the records, and
    returns them."""
    for name, record in records.items():
        other = again.records.get(name)
        if other is None or record.why is not None:
            continue
        if (
            again.error is not None
            or not record.does_as(other)
            or (name == NOBODY and fills_of(record) != fills_of(other))
        ):
            record.comes_whole(OTHERWISE)
            record.written |= record.storages | other.storages
    return records


def _count_whole(records: Mapping[str, Record]) -> int:
    return sum([record.why is not None for record in records.values()])


def _untouched(model: torch.nn.Module, records: Mapping[str, Record]) -> dict[str, int]:
    """By parameter or persistent buffer, how many of its elements nothing reaches."""
    unknown = set[int]()
    reached: dict[int, list[torch.Tensor]] = {}
    for record in records.values():
        if record.why is not None:
            unknown |= record.storages
            continue
        for view in [view for _, view in record.pieces] + [fill.view for fill in _distinct(record.fills)]:
            reached.setdefault(storage_of(view), []).append(view)
    passing = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    found = {}
    for name, tensor in named_tensors(model):
        if name in passing or storage_of(tensor) in unknown:
            continue
        whole = extent(tensor)
        views = [view for view in reached.get(storage_of(tensor), ()) if whole.begin <= extent(view).begin < whole.end]
        left = tensor.nbytes - sum([view.nbytes for view in views])
        if left > 0:
            found[name] = left // tensor.element_size()
    return found


def _distinct(fills: Iterable[Fill]) -> list[Fill]:
    return [*{(extent(fill.view), repr(fill.value)): fill for fill in fills}.values()]


def _place(view: torch.Tensor, places: Mapping[int, list[tuple[str, torch.Tensor]]]) -> dict[str, Any]:
    """Where a view lies in the model, as data for JSON; offset and strides count elements."""
    begin = extent(view).begin
    its = places[storage_of(view)]
    name, whole = next((each for each in its if extent(each[1]).begin <= begin < extent(each[1]).end), its[0])
    offset = (begin - extent(whole).begin) // view.element_size()
    return {"shape": list(view.shape), "parameter": name, "offset": offset, "strides": list(view.stride())}


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _current_state(depends_on: Any) -> Any:
    return depends_on() if callable(depends_on) else depends_on


def _copied_state(depends_on: Any) -> Any:
    """The present value of `depends_on=`, copied, so that a change in place is noticed."""

    def copied(leaf: Any) -> Any:
        """Return a copy of a leaf that can be copied; else the leaf."""
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        return leaf.copy() if hasattr(leaf, "copy") else leaf

    return tree_map(copied, _current_state(depends_on))


def _same_state(one: Any, other: Any) -> bool:
    if torch.utils._pytree.tree_structure(one) != torch.utils._pytree.tree_structure(other):
        return False
    return all(map(_same_leaf, tree_leaves(one), tree_leaves(other)))


def _same_leaf(one: Any, other: Any) -> bool:
    """True if two leaves have one class and shape, and equal elements. NaN equals nothing."""
    if type(one) is not type(other) or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    equal = one == other  # of arrays an array
    return bool(equal.all() if hasattr(equal, "all") else equal)
