"""Landings: where a model's own loader puts each tensor of a checkpoint.

The loader runs on tensors without memory (on the meta device). A `_Recorder` follows each of them through views and
copies, and records what would be copied into the model; the model doesn't change. A tensor that the loader only slices,
transposes, copies and casts lands in boxes that we know then, whatever the loader's rules are: it is direct. A tensor
that the loader computes with has to come whole, and is handed to the loader after each run.

A record is trusted only if three things hold; else the tensor comes whole. Each operation is a view, a copy or a fill
with a constant that we know (`_Recorder`). The loader does the same when it is asked a second time (`_ask`). No two
tensors, and no tensor and a fill, go to one place (`_conflicts`).

Start reading at `find_landings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .pieces import Piece
from .sharding import CASTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
# Parts of the errors that numpy(), tolist(), a copy to real memory and `param.data = weight` raise for a meta tensor.
# The loader asked for values then, which says nothing against the tensor's name.
_NO_VALUES = "meta device", "unallocated storage", "meta tensor; no data", "have incompatible tensor type"
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)
_SHOWN = 5  # names in one message

REFUSED = "its loader ends with"
SHARED = "another tensor goes to the same memory"
BESIDE = "another tensor of its module comes whole"
OTHERWISE = "its loader does otherwise when it is asked again"


class Meta(NamedTuple):
    """Name, type and shape of a tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A tensor of its shape and type."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Fill(NamedTuple):
    """Memory of the model that the loader sets to a constant, such as rows that pad a vocabulary."""

    view: torch.Tensor
    value: Any


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
        self, load: Load, model: torch.nn.Module, tensors: Sequence[Meta], depends_on: Any, memory: _Memory
    ) -> None:
        self.direct: dict[str, tuple[Piece, ...]] = {}
        self.whole: dict[str, str] = {}
        self.skipped: tuple[str, ...] = ()
        self.untouched: dict[str, int] = {}
        self.fills: tuple[Fill, ...] = ()
        self._load, self._model, self._tensors = load, model, tuple(tensors)
        self._depends_on, self._depended = depends_on, _copied_state(depends_on)
        self._memory, self._buffers = memory, dict[str, torch.Tensor]()
        self._whole_storages: set[int] = set()

    def target(self) -> dict[str, Any]:
        """The target of a `Transfer`: pieces for each direct tensor, and an empty tensor for each that comes whole.

        Skipped names aren't in it, so make the Transfer with ``strict=False``. The empty tensors are allocated once, on
        the device of the model's first parameter, and live as long as this object.
        """
        if self.whole.keys() != self._buffers.keys():
            device = self._memory.device
            self._buffers = {meta.name: meta.empty(device) for meta in self._tensors if meta.name in self.whole}
        return {**self._buffers, **self.direct}

    def load_whole(self, copies: bool = False) -> None:
        """Write the loader's constants, and hand the tensors that came whole to the loader, in one call.

        Call it after each `Transfer.run` into `target()`.

        Args:
            copies: hand a copy of each tensor to the loader, made when the loader asks for it. A loader may change or
                keep what it gets, and the next run of a `Transfer` with `changes` needs what came last.

        Raises:
            RuntimeError: `target()` wasn't called before, so nothing can have arrived.
        """
        if self.whole.keys() != self._buffers.keys():
            raise RuntimeError("Nothing came whole yet: give target() to a Transfer, run it, and then call load_whole.")
        with torch.no_grad():
            for view, value in self.fills:
                view.fill_(value)
            if self._buffers and copies:
                self._load((name, tensor.clone()) for name, tensor in self._buffers.items())
            elif self._buffers:
                self._load([*self._buffers.items()])

    def stale(self) -> str | None:
        """Why these landings don't hold any more, in words; None if they do. Then `again` asks the loader anew.

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
        """Ask the same loader for the same tensors again. From then on use the `target()` of the result, not that of
        this object."""
        return find_landings(self._load, self._model, self._tensors, self._depends_on)

    def as_data(self) -> dict[str, Any]:
        """The landings as JSON-compatible data, for programs that plan transfers themselves.

        For each box of a direct tensor: its `start` and `shape` in the tensor, the `parameter` that it goes to, and
        `offset` and `strides` (one for each dim of the box) there, in elements from the parameter's first.
        """
        places = self._memory.places
        direct = {
            name: [
                {"start": list(piece.start), **_place(piece._local_tensor, places), "dtype": _said(piece._local_tensor)}
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

    @property
    def whole_storages(self) -> set[int]:
        """The storages of the model (see `storages`) that tensors which come whole are written to, or may be."""
        return self._whole_storages

    def nbytes(self, kind: str) -> int:
        """How many bytes of the model are written directly ("direct"), or how many come whole ("whole")."""
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
        said += [f"whole, {why}: {_listed(names)}" for why, names in reasons.items()]
        said += [f"untouched: {_listed(list(self.untouched))}"] if self.untouched else []
        return "\n".join(said)


def metas_of(tensors: Any) -> list[Meta]:
    """Names, types and shapes, from a mapping of tensors, from pairs, or from values with a name, a dtype and a shape.

    Raises:
        TypeError: something that is none of these.
        ValueError: a name comes twice.
    """
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
    unreliable: Mapping[int, str] | None = None,
    when_refused: Callable[[str], object] | None = None,
) -> Landings:
    """`torch_overlay.landings`, with two more arguments for integrations that know their server.

    Args:
        unreliable: storages of the model (see `storages`) that no tensor may be written into directly, each with the
            reason.
        when_refused: called with the reason if the loader refuses tensors, instead of raising an error. All tensors
            come whole then. For a model with layers that were laid out anew after loading: they refuse now what their
            loader takes during a reload.
    """
    metas = metas_of(tensors)
    sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if sharded:
        raise TypeError(
            f"The parameters {_listed(sharded)} of the model are DTensors, which say where they lie: give them to a "
            "Transfer as they are. landings() asks loaders of plain parameters."
        )
    memory = _Memory(model)
    for apart in (False, True):
        asked = _ask(load, memory, metas, apart)
        if asked.refused is not None:
            if when_refused is None:
                raise ValueError(
                    f"landings() needs a loader that takes all {len(metas)} tensors, and that of "
                    f"{type(model).__name__} {asked.refused}. Leave out what this model doesn't have, or give it the "
                    "name that it has in a checkpoint."
                )
            when_refused(asked.refused)
        records = asked.records
        _settle(records, memory, set(unreliable or ()), unreliable or {})
        _rehearse(load, memory, metas, records)
        if _NOBODY not in records or records[_NOBODY].why is None:
            break
        # A fill lies in memory of a module of which something comes whole. Asked for one tensor at a time, the loader
        # shows which tensor the fill belongs to.
    found = Landings(load, model, metas, depends_on, memory)
    for meta in metas:
        record = records[meta.name]
        if record.why is not None:
            found.whole[meta.name] = record.why
        elif record.pieces:
            found.direct[meta.name] = tuple([Piece(view, meta.shape, start) for start, view in record.pieces])
    found._whole_storages = set().union(*[record.storages for record in records.values() if record.why is not None])
    fills = [fill for record in records.values() if record.why is None for fill in record.fills]
    found.fills = tuple(_distinct(fills))
    found.skipped = tuple([meta.name for meta in metas if not {meta.name} & (found.direct.keys() | found.whole.keys())])
    found.untouched = _untouched(model, memory, records)
    return found


def all_whole(load: Load, model: torch.nn.Module, tensors: Any, why: str) -> Landings:
    """Landings in which every tensor comes whole. The loader isn't asked."""
    memory, metas = _Memory(model), metas_of(tensors)
    found = Landings(load, model, metas, None, memory)
    found.whole, found._whole_storages = {meta.name: why for meta in metas}, memory.storages
    return found


class _Record:
    """What the loader was seen to do with one tensor.

    Attributes:
        pieces: for each box, where it begins in the tensor, and the view of the model that it goes to.
        fills: the constants that the loader writes meanwhile.
        why: the reason why it comes whole; None if it is direct.
        written: storages of the model that are written in a way that we don't know.
        error: the error with which the loader refused it.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self.fills: list[Fill] = []
        self.why: str | None = None
        self.written: set[int] = set()
        self.error: Exception | None = None

    def comes_whole(self, why: str) -> None:
        """Mark it as one that comes whole. The first reason is kept, as it is the cause of later ones."""
        if self.why is None:
            self.why = why

    @property
    def storages(self) -> set[int]:
        """The storages of the model that it goes to."""
        return (
            {storage_of(view) for _, view in self.pieces}
            | {storage_of(fill.view) for fill in self.fills}
            | self.written
        )

    def does_as(self, other: _Record) -> bool:
        """True if the loader did the same with it the other time. Fills aren't compared: when all tensors come in one
        call, no tensor is known to be their cause."""

        def said(record: _Record) -> Any:
            pieces = [(start, _extent(view), view.dtype) for start, view in record.pieces]
            return record.why, pieces, record.written

        return bool(said(self) == said(other))


class _Asked(NamedTuple):
    """Attributes:
    records: by name; all of `tensors`.
    refused: which tensors the loader refuses also together with all others, in words; None if it takes them.
    """

    records: dict[str, _Record]
    refused: str | None


# The name under which an operation is recorded in which no tensor takes part, such as a fill between two copies.
_NOBODY = "\0nobody"


def _ask(load: Load, memory: _Memory, metas: Sequence[Meta], apart: bool) -> _Asked:
    """Ask a loader for all tensors in one call, twice. If it refuses, or does things that can't be assigned to one
    tensor, ask for one tensor at a time.

    A tensor that is refused alone is recorded from the call with all others: loaders that count what they got refuse
    each tensor alone, and some models refuse a tied head without its embedding.

    Args:
        apart: skip the call with all tensors, and ask for one at a time.
    """
    together = _Run(load, memory, metas)
    if together.is_clear and not apart:
        return _Asked(_confirmed(together.records, _Run(load, memory, metas)), None)
    alone = {meta.name: _Run(load, memory, [meta], apart=True) for meta in metas}
    records = {name: run.records[name] for name, run in alone.items()}
    needs_values = {name for name, run in alone.items() if run.error is not None and run.needs_values}
    refused = [name for name, run in alone.items() if run.error is not None and not run.needs_values]
    for name in [*needs_values, *refused]:
        # The loader stopped half way, so what else it would have written is unknown.
        records[name].written |= memory.storages
    if not refused:
        return _Asked(records, None)
    if together.error is None:
        _take_together(records, refused, together)
        return _Asked(_confirmed(records, together), None)
    if needs_values:
        rest = _Run(load, memory, [meta for meta in metas if meta.name not in needs_values])
        if rest.error is None or together.needs_values:
            # The others are accepted without those that need values; or even the call with all of them asks for a
            # value, so that nothing on meta can tell. In both cases those that were refused come whole.
            return _Asked(records, None)
    return _Asked(records, _refusal(load, memory, metas, refused, needs_values, together.error))


def _take_together(records: dict[str, _Record], refused: Sequence[str], together: _Run) -> None:
    """Record tensors that are refused alone as they were seen in the call with all others.

    Writes of that call in which no tensor took part, and which no other tensor causes when it is alone, may be due to
    these tensors. If there are any, these tensors come whole.
    """
    others = [record for name, record in records.items() if name not in refused]
    nobody = together.records[_NOBODY]
    written = nobody.written.difference(*[record.written for record in others])
    fills = _fills(nobody).difference(*[_fills(record) for record in others])
    written |= {extent.storage for extent, _ in fills}
    for name in refused:
        records[name] = together.records[name]
        if written:
            records[name].comes_whole("its loader writes what can't be told from others'")
            records[name].written |= written


def _confirmed(records: dict[str, _Record], again: _Run) -> dict[str, _Record]:
    """Mark as whole the tensors with which the loader does something else in a second run.

    A loader may keep state: one that counts experts puts the same tensor elsewhere the next time.
    """
    for name, record in records.items():
        other = again.records.get(name)
        if other is None or record.why is not None:
            continue
        if (
            again.error is not None
            or not record.does_as(other)
            or (name == _NOBODY and _fills(record) != _fills(other))
        ):
            record.comes_whole(OTHERWISE)
            record.written |= record.storages | other.storages
    return records


def _refusal(
    load: Load,
    memory: _Memory,
    metas: Sequence[Meta],
    refused: Sequence[str],
    needs_values: Collection[str],
    error: Exception | None,
) -> str:
    """Say which tensors the loader refuses: of those that it refuses alone, those that it also refuses together with
    all that it accepts."""
    out = []
    for name in refused[:64] if len(refused) < len(metas) else ():
        others = {*refused, *needs_values} - {name}
        run = _Run(load, memory, [meta for meta in metas if meta.name not in others])
        if run.error is not None:
            out.append(name)
            error = run.error
    return f"refuses {_listed(out or refused)}, with {type(error).__name__}: {error}"


def _rehearse(load: Load, memory: _Memory, metas: Sequence[Meta], records: dict[str, _Record]) -> None:
    """Run the loader as `Landings.load_whole` will, with the tensors that come whole and without the others.

    If it then writes to memory of a direct tensor, that tensor comes whole, too, and so on. If it refuses, all tensors
    come whole.
    """
    while True:
        some = [meta for meta in metas if records[meta.name].why is not None]
        if not some or len(some) == len(metas):
            return
        run = _Run(load, memory, some)
        if run.error is not None and not run.needs_values:
            for record in records.values():
                record.comes_whole("its loader takes those that come whole only with all others")
            return
        written = set().union(*[record.storages for record in run.records.values()])
        before = _count_whole(records)
        _settle(records, memory, written & memory.storages, {})
        if before == _count_whole(records):
            return


def _count_whole(records: Mapping[str, _Record]) -> int:
    return sum([record.why is not None for record in records.values()])


def _settle(records: dict[str, _Record], memory: _Memory, written: set[int], why: Mapping[int, str]) -> None:
    """Mark more tensors as whole, until the direct ones are independent of them.

    A direct tensor must not share a storage with an unknown write or with a conflict (`_conflicts`), and must not go to
    a module of which something comes whole: vLLM reloads whole modules, and would lose what was written directly.

    Args:
        written: storages that are written in an unknown way. Those of tensors that come whole are added.
        why: for some of these storages, the reason to give.
    """
    written |= _conflicts(records)
    reason = dict.fromkeys(written, SHARED) | dict(why)
    while True:
        for record in records.values():
            if record.why is not None:
                written |= record.storages
        grown = written | memory.siblings(written)
        more = [record for record in records.values() if record.why is None and record.storages & grown]
        if not more:
            return
        for record in more:
            touched = [storage for storage in record.storages if storage in reason]
            record.comes_whole(reason[touched[0]] if touched else BESIDE)
        written = grown


def _conflicts(records: Mapping[str, _Record]) -> set[int]:
    """Storages in which two pieces, or a piece and a fill, overlap. The loader's order of writing decides there, and a
    run keeps no order. Two fills of one value may overlap."""
    found = set[int]()
    views: list[tuple[torch.Tensor, Any]] = []
    for record in records.values():
        views += [(view, _PIECE) for _, view in record.pieces if record.why is None]
        views += record.fills
    open_: list[tuple[torch.Tensor, Any]] = []
    for view, value in sorted(views, key=lambda each: (storage_of(each[0]), _extent(each[0]).begin)):
        begin = _extent(view).begin
        open_ = [each for each in open_ if storage_of(each[0]) == storage_of(view) and _extent(each[0]).end > begin]
        if any(_meet(other, view) and not (value is not _PIECE and value == its) for other, its in open_):
            found.add(storage_of(view))
        open_.append((view, value))
    return found


_PIECE = object()


class _Extent(NamedTuple):
    """The bytes of a storage that a view spans: from `begin` to before `end`."""

    storage: int
    begin: int
    end: int
    steps: tuple[tuple[int, int], ...]  # of each dim of more than one element, its stride and its length


def _extent(view: torch.Tensor) -> _Extent:
    """Return the bytes of its storage that a view spans. A view without elements spans none."""
    size = view.element_size()
    steps = tuple([(step * size, length) for step, length in zip(view.stride(), view.shape) if length != 1])
    begin = view.storage_offset() * size
    last = sum([(length - 1) * step for step, length in steps])
    return _Extent(storage_of(view), begin, begin + last + size if view.numel() else begin, steps)


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two views may have an element in common; False only if they surely have none."""
    first, second = _extent(one), _extent(other)
    if first.storage != second.storage or first.end <= second.begin or second.end <= first.begin:
        return False
    if one.element_size() != other.element_size() or one.stride() != other.stride():
        return True  # with other steps it takes more than a comparison of coordinates, so assume the worse
    # With equal strides both are boxes of one grid: they are apart if they are apart along some dim.
    left = [one.storage_offset(), other.storage_offset()]
    for step, *lengths in sorted(zip(one.stride(), one.shape, other.shape), reverse=True):
        starts = [at // step if step else 0 for at in left]
        left = [at - start * step for at, start in zip(left, starts)]
        if starts[0] + lengths[0] <= starts[1] or starts[1] + lengths[1] <= starts[0]:
            return False
    return True


class _Run:
    """One call of the loader on tensors without memory. The model is restored afterwards.

    Attributes:
        records: by name. Operations without a tensor are under `_NOBODY`; if the loader got one tensor alone
            (`apart`), under that tensor's name.
        error: the error that the loader raised, or None.
        needs_values: True if it asked for the value of an element, which a meta tensor doesn't have.
    """

    def __init__(self, load: Load, memory: _Memory, metas: Sequence[Meta], apart: bool = False) -> None:
        nobody = metas[0].name if apart else _NOBODY
        recorder = _Recorder(metas, memory.storages, nobody)
        self.records, self.error, self.needs_values = recorder.records, None, False
        weights = [*recorder.tensors.items()]
        try:
            with recorder, torch.no_grad():
                load(weights)
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames hold the tensors, which `kept` would count as kept
            self.needs_values = recorder.needs_values or any(words in str(error) for words in _NO_VALUES)
            if apart:
                self.records[nobody].comes_whole(f"{REFUSED} {type(error).__name__}: {error}")
        for name in [] if self.error is not None else recorder.kept():
            self.records[name].comes_whole("its loader keeps it")
            self.records[name].written |= memory.storages
        if memory.restore():
            self.records[nobody].comes_whole("its loader keeps it")
            self.records[nobody].written |= memory.storages

    @property
    def is_clear(self) -> bool:
        """True if each write is known to belong to one tensor.

        Fills without a tensor are fine, too, as long as they don't touch memory of a tensor that comes whole, or of a
        piece.
        """
        nobody = self.records[_NOBODY] if _NOBODY in self.records else _Record()
        if self.error is not None or nobody.why is not None:
            return False
        unknown = set().union(*[record.storages for record in self.records.values() if record.why is not None])
        return not {storage_of(fill.view) for fill in nobody.fills} & (unknown | _conflicts(self.records))


class _Base(NamedTuple):
    """What a storage holds during a run of the loader: a tensor of the checkpoint, or a copy of a box of it, with its
    dims in any order.

    Attributes:
        name: the tensor's name.
        shape: the shape of the memory, which is dense.
        stride: its strides.
        start: where the box begins in the tensor.
        dims: for each dim of the memory, the tensor's dim; None for a dim of length 1 that the tensor doesn't have.
        dtypes: the types that the values went through, in order.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: tuple[int, ...]
    dims: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]

    def box(self, view: torch.Tensor) -> tuple[tuple[int, ...], tuple[int | None, ...]] | None:
        """The box of the tensor that a view of this memory shows: where it begins, and for each dim of the view the dim
        of the tensor. None if the view isn't a box.

        In dense memory each element has one address. So the view's offset gives the start, and a dim of the view runs
        along that dim of the memory which has the same stride.
        """
        order = sorted(range(len(self.shape)), key=lambda dim: self.stride[dim], reverse=True)
        begins, left = [0] * len(self.shape), view.storage_offset()
        for dim in order:
            if self.shape[dim] > 1:
                begins[dim], left = divmod(left, self.stride[dim])
        if left:
            return None
        along: list[int | None] = []
        for length, step in zip(view.shape, view.stride()):
            fits = [dim for dim in order if self.shape[dim] > 1 and self.stride[dim] == step] if length > 1 else []
            if length > 1 and (not fits or fits[0] in along or begins[fits[0]] + length > self.shape[fits[0]]):
                return None
            along.append(fits[0] if fits else None)
        start = list(self.start)
        for dim, begin in enumerate(begins):
            its = self.dims[dim]
            if its is not None:
                start[its] += begin
        return tuple(start), tuple([None if dim is None else self.dims[dim] for dim in along])


class _Recorder(TorchDispatchMode):
    """Follows tensors through the operations of a loader. Writes to the model are recorded and not done.

    Attributes:
        tensors: the tensors on meta that the loader gets, by name.
        records: what was seen, by name; under `nobody` what no tensor takes part in.
        needs_values: True if the value of an element was asked for.
    """

    def __init__(self, metas: Sequence[Meta], storages: Collection[int], nobody: str) -> None:
        super().__init__()
        self.tensors = {meta.name: meta.empty("meta") for meta in metas}
        self.records = {name: _Record() for name in (*self.tensors, nobody)}
        self.needs_values = False
        self._storages, self._nobody = storages, nobody
        self._bases: dict[int, _Base] = {}
        self._computed: dict[int, frozenset[str]] = {}  # by storage, the names of what it was computed from
        self._alive: list[torch.Tensor] = []  # else their storage's address might be another tensor's
        self._users: list[tuple[str, torch.Tensor, int]] = []
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            base = _Base(name, shape, tensor.stride(), (0,) * len(shape), tuple(range(len(shape))), (tensor.dtype,))
            self._follow(tensor, base)

    def _follow(self, tensor: torch.Tensor, base: _Base) -> None:
        """Remember that the storage of `tensor` holds `base`, and keep `tensor` alive during the run of the loader."""
        self._bases[storage_of(tensor)] = base
        self._alive.append(tensor)
        self._users.append((base.name, tensor, _users(tensor)))

    def kept(self) -> list[str]:
        """The names of tensors of which the loader still holds a view, or a view of a copy: it may write them later."""
        return [*dict.fromkeys([name for name, tensor, users in self._users if _users(tensor) > users])]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        names = {name for tensor in given for name in self._names(tensor)}
        written = _written(func, args, kwargs)
        into_model = {key for key in map(storage_of, written) if key in self._storages}
        if func is _aten.copy_.default and storage_of(args[1]) in self._bases and not self._names(args[0]):
            self._copied(args[0], args[1])
            return args[0]
        if into_model and not names and func in _FILLS:
            self._filled(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        if into_model or (names and written):
            return self._wrote(func, args, kwargs, names, written, into_model)
        if func in _COPIES and names:
            return self._copy(args[0], kwargs)
        return self._computes(func, args, kwargs, names)

    def _names(self, tensor: torch.Tensor) -> Collection[str]:
        """Return the names of the checkpoint's tensors that `tensor` is a view of or was computed from; () for none."""
        base = self._bases.get(storage_of(tensor))
        return (base.name,) if base is not None else self._computed.get(storage_of(tensor), ())

    def _unknown(self, func: Any, names: Collection[str]) -> None:
        """Mark these tensors as whole, since the loader called an operation on them that `_Recorder` doesn't follow.

        Args:
            func: the operation, for the reason.
        """
        for name in names:
            self.records[name].comes_whole(f"its loader calls {func}")

    def _computes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str]) -> Any:
        """Run an operation that doesn't write to the model. If it takes a tensor of the checkpoint, its results are
        views of that tensor, or else are marked as computed from it."""
        if names:
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            if isinstance(error, NotImplementedError) or not asks.isdisjoint(func.tags):
                self.needs_values = True
            raise
        if names:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if func is _aten.view.dtype or not all(storage_of(leaf) in self._bases for leaf in made):
                self._unknown(func, names)
            self._mark(made, names)
        return result

    def _mark(self, made: Sequence[torch.Tensor], names: Collection[str]) -> None:
        """Record that tensors were computed from tensors of the checkpoint. A later use of them counts as a use of
        those.

        Skips tensors that show a box of a tensor of the checkpoint, which `_follow` has recorded, and memory of the
        model.

        Args:
            made: the tensors that an operation returned or wrote.
            names: the names of the checkpoint's tensors that it read.
        """
        for tensor in made:
            key = storage_of(tensor)
            if key not in self._bases and key not in self._storages:
                self._computed[key] = frozenset([*names, *self._computed.get(key, ())])
                self._alive.append(tensor)

    def _wrote(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Collection[str],
        written: Sequence[torch.Tensor],
        into_model: set[int],
    ) -> Any:
        """Record a write that is no plain copy and no fill: into the model, or to a tensor of the checkpoint."""
        if func is _aten._foreach_copy_.default and all(storage_of(source) in self._bases for source in args[1]):
            for target, source in zip(args[0], args[1]):
                self._copied(target, source)
            return None
        for name in names or (self._nobody,):
            self.records[name].comes_whole(f"its loader calls {func}")
            self.records[name].written |= into_model
        self._mark(written, names)
        if not into_model and all(tensor.is_meta for tensor in written):
            return func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))  # may change the shape
        return written[0]

    def _copy(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Follow a copy, perhaps of another type or on another device, as the box of the tensor that it shows."""
        kwargs = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
        made: torch.Tensor = _aten._to_copy.default(tensor, device=torch.device("meta"), **kwargs)
        base = self._bases.get(storage_of(tensor))
        if base is None:
            self._mark([made], self._names(tensor))
            return made
        box = base.box(tensor) if _is_plain(tensor, base) else None
        if box is None:
            self.records[base.name].comes_whole("its loader takes elements that make no box")
            self._mark([made], [base.name])
            return made
        dtypes = base.dtypes if made.dtype == base.dtypes[-1] else (*base.dtypes, made.dtype)
        self._follow(made, _Base(base.name, tuple(made.shape), made.stride(), *box, dtypes))
        return made

    def _filled(self, target: torch.Tensor, value: Any) -> None:
        """Record that the loader wrote a constant into memory of the model; nothing if `target` is empty."""
        if target.numel():
            self.records[self._nobody].fills.append(Fill(torch.Tensor.detach(target), value))

    def _copied(self, target: torch.Tensor, view: torch.Tensor) -> None:
        """Record a `copy_` from a tensor of the checkpoint, or from a view of it.

        The tensor gets a piece, which can be written directly, if the source is a box of the tensor with the target's
        shape, the target is memory of the model, the values are cast at most once, and all pieces of the tensor go to
        one dtype and device. Otherwise it is marked as whole, with the reason. A copy of no elements isn't recorded.

        Args:
            target: what the loader copies to.
            view: the source. `_follow` knows its storage.
        """
        base = self._bases[storage_of(view)]
        record = self.records[base.name]
        if storage_of(target) not in self._storages:
            record.comes_whole("its loader copies it to memory that isn't the model's")
            self._mark([target], [base.name])
            return
        if not view.numel() and not target.numel():
            return
        types = base.dtypes if target.dtype == base.dtypes[-1] else (*base.dtypes, target.dtype)
        box = base.box(view)
        if not _is_plain(view, base) or _is_turned(target):
            record.comes_whole("its loader takes its elements for another type's")
        elif len(types) > 2 or (len(types) > 1 and not CASTS.issuperset([str(each)[6:] for each in types])):
            record.comes_whole("its loader makes another type of it")
        elif box is None or target.shape != view.shape:
            record.comes_whole("its loader takes elements that make no box")
        elif any((other.dtype, other.device) != (target.dtype, target.device) for _, other in record.pieces):
            record.comes_whole("it goes to memory of several types or devices")
        else:
            start, dims = box
            record.pieces.append((start, _in_order(torch.Tensor.detach(target), dims, len(start))))
            return
        record.written.add(storage_of(target))


def _is_plain(view: torch.Tensor, base: _Base) -> bool:
    """True if a view shows the elements themselves: not conjugates, negatives, or their bits as another type."""
    return view.dtype == base.dtypes[-1] and not _is_turned(view)


def _is_turned(view: torch.Tensor) -> bool:
    return view.is_conj() or view.is_neg()


def _on_meta(leaf: Any) -> Any:
    """A meta tensor in place of one with memory, since operators refuse to mix the two. Scalars may be mixed."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or not leaf.ndim:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _in_order(view: torch.Tensor, dims: Sequence[int | None], ndim: int) -> torch.Tensor:
    """Transpose a view of the model so that its dims are those of the checkpoint's tensor, in that order."""
    for at in reversed([at for at, dim in enumerate(dims) if dim is None]):
        view = view.squeeze(at)
    places = [dim for dim in dims if dim is not None]
    view = view.permute(sorted(range(len(places)), key=places.__getitem__))
    for dim in range(ndim):
        if dim not in places:
            view = view.unsqueeze(dim)
    return view


class _Slot(NamedTuple):
    """A parameter or buffer of a module, as it was before the loader ran."""

    module: torch.nn.Module
    table: str
    key: str
    tensor: torch.Tensor
    data: torch.Tensor  # alive, so that its storage's address isn't another's


_TABLES = "_parameters", "_buffers"


class _Memory:
    """The parameters and buffers of a model, as they were when this was made.

    Attributes:
        storages: their storages.
        places: for each storage, the names and tensors of the parameters and buffers in it.
        device: the device of the first parameter.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._slots = model, [*_slots(model)]
        self._keys = {(id(m), table): {*getattr(m, table)} for m in model.modules() for table in _TABLES}
        self._said = _names_and_shapes(model)
        self.storages = {storage_of(slot.data) for slot in self._slots}
        self._modules: dict[int, set[int]] = {}
        for slot in self._slots:
            self._modules.setdefault(id(slot.module), set()).add(storage_of(slot.data))
        self.places: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in _named(model):
            self.places.setdefault(storage_of(tensor), []).append((name, tensor.detach()))
        self.device = next((slot.data.device for slot in self._slots), torch.device("cpu"))

    def siblings(self, storages: set[int]) -> set[int]:
        """All storages of those modules that have at least one of these storages."""
        return set().union(*[own for own in self._modules.values() if own & storages])

    def restore(self) -> bool:
        """Restore parameters and buffers that a loader replaced or added, or whose memory it replaced. True if there
        were any."""
        replaced = False
        for module, table, key, tensor, data in self._slots:
            its = getattr(module, table)
            if its.get(key) is not tensor:
                its[key], replaced = tensor, True
            if _extent(tensor) != _extent(data) or tensor.shape != data.shape:
                tensor.data, replaced = data, True
        for module in self._model.modules():
            for table in _TABLES:
                for key in getattr(module, table).keys() - self._keys.get((id(module), table), set()):
                    del getattr(module, table)[key]
                    replaced = True
        return replaced

    def change(self, model: torch.nn.Module, storages: Collection[int]) -> str | None:
        """What has changed in the model since, in words: a name, a shape or a type, or the address of one of these
        storages. None if nothing has."""
        now = _names_and_shapes(model)
        if now != self._said:
            differ = [name for name in {**self._said, **now} if self._said.get(name) != now.get(name)]
            return f"the model has other tensors: {_listed(differ)}"
        here = {name: _extent(tensor) for name, tensor in _named(model)}
        for storage in storages:
            for name, tensor in self.places[storage]:
                if here[name] != _extent(tensor):
                    return f"{name!r} of the model lies elsewhere"
        return None


def _slots(model: torch.nn.Module) -> Iterator[_Slot]:
    """Yield all parameters and buffers of a model, module by module. A tensor that two modules share comes twice."""
    for module in model.modules():
        for table in _TABLES:
            for key, tensor in getattr(module, table).items():
                if tensor is not None:
                    yield _Slot(module, table, key, tensor, tensor.detach())


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _names_and_shapes(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _named(model)}


def storages(module: torch.nn.Module, recurse: bool = True) -> set[int]:
    """The storages of a module's parameters and buffers, as `find_landings` takes them in `unreliable`."""
    return {storage_of(tensor) for tensor in (*module.parameters(recurse), *module.buffers(recurse))}


def _untouched(model: torch.nn.Module, memory: _Memory, records: Mapping[str, _Record]) -> dict[str, int]:
    """For each parameter or persistent buffer that isn't written completely, how many of its elements nothing reaches.

    A tensor that comes whole counts as writing all of each storage that it goes to.
    """
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
    for name, tensor in _named(model):
        if name in passing or storage_of(tensor) in unknown:
            continue
        whole = _extent(tensor)
        views = [view for view in reached.get(storage_of(tensor), ()) if whole.begin <= _extent(view).begin < whole.end]
        left = tensor.nbytes - sum([view.nbytes for view in views])
        if left > 0:
            found[name] = left // tensor.element_size()
    return found


def _fills(record: _Record) -> set[tuple[_Extent, str]]:
    return {(_extent(fill.view), repr(fill.value)) for fill in record.fills}


def _distinct(fills: Iterable[Fill]) -> list[Fill]:
    """Fills of one place and value, once."""
    return [*{(_extent(fill.view), repr(fill.value)): fill for fill in fills}.values()]


def _place(view: torch.Tensor, places: Mapping[int, list[tuple[str, torch.Tensor]]]) -> dict[str, Any]:
    """Describe where a view lies in the model, as data for JSON: its shape, the name of a parameter or buffer that
    contains its first element, the offset of that element in the parameter, and its strides. Offset and strides count
    elements.

    Args:
        view: memory of the model.
        places: for each storage, the names and tensors of the parameters and buffers in it.
    """
    begin = _extent(view).begin
    its = places[storage_of(view)]
    name, whole = next((each for each in its if _extent(each[1]).begin <= begin < _extent(each[1]).end), its[0])
    offset = (begin - _extent(whole).begin) // view.element_size()
    return {"shape": list(view.shape), "parameter": name, "offset": offset, "strides": list(view.stride())}


def _said(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _current_state(depends_on: Any) -> Any:
    return depends_on() if callable(depends_on) else depends_on


def _copied_state(depends_on: Any) -> Any:
    """The present value of `depends_on`. Tensors, arrays and lists are copied, so that a change in place is noticed."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        return leaf.copy() if hasattr(leaf, "copy") else leaf

    return tree_map(copied, _current_state(depends_on))


def _same_state(one: Any, other: Any) -> bool:
    if torch.utils._pytree.tree_structure(one) != torch.utils._pytree.tree_structure(other):
        return False
    return all(map(_same_leaf, tree_leaves(one), tree_leaves(other)))


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    equal = one == other  # of arrays an array
    return bool(equal.all() if hasattr(equal, "all") else equal)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function changes, as its schema says."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return found


def storage_of(tensor: torch.Tensor) -> int:
    """A number that identifies the storage of a tensor, equal for all its views. Another storage may get the same
    number after this one is freed. `storages` returns these numbers."""
    return int(tensor.untyped_storage()._cdata)


def _users(tensor: torch.Tensor) -> int:
    """How many tensors use its storage, plus a constant: only differences mean something."""
    return int(torch._C._storage_Use_Count(storage_of(tensor)))
