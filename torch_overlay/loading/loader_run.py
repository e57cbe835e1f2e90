"""One call of a model's loader on tensors without memory: what would have been copied where. Start at `LoaderRun`.

A `_Recorder` follows each tensor through the loader's views and copies. Writes to the model are recorded and not done,
and `ModelMemory` restores what the loader replaced. `landings.py` calls loaders in this way, and decides which of the
records can be trusted.
"""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..transfers.sharding import CASTS
from ..transfers.stages import as_on_meta

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from .attributes import PlainAttributes, Where

    Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
# Parts of the errors that numpy(), tolist(), a copy to real memory and `param.data = weight` raise for a meta tensor.
# The loader asked for values then, which says nothing against the tensor's name.
_NO_VALUES = (
    "meta device",
    'on device "meta"',
    "unallocated storage",
    "meta tensor; no data",
    "have incompatible tensor type",
)
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)
_SHOWN = 5  # names in one message
REFUSED = "its loader ends with"
# The name under which an operation is recorded in which no tensor takes part, such as a fill between two copies.
NOBODY = "\0nobody"
_TABLES = "_parameters", "_buffers", "_modules"
# These look at the memory of a tensor without an operation that a dispatch mode sees.
_LOOKS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)
# Of a tensor on meta these say nothing, or that it has no values.
_ADDRESSES = (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__reduce_ex__)
_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
ASKS = "its loader asks for a value, and goes on without it"
_PIECE = object()  # in place of a fill's value, for a view to which a tensor is copied


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
        """Return a tensor of its shape and type, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Fill(NamedTuple):
    """Memory of the model that the loader sets to a constant, such as rows that pad a vocabulary."""

    view: torch.Tensor
    value: Any


class LoaderRun:
    """One call of the loader on tensors without memory. The model's tensors are restored afterwards.

    Args:
        load: the loader, which takes pairs of a name and a tensor. An exception of it is kept in `error`.
        memory: of the model.
        metas: the tensors that it gets.
        apart: True for a single tensor, to which then everything is assigned that the loader does.
        attributes: of the model, to read what the loader leaves in them.

    Attributes:
        records: by name. Operations without a tensor are under `NOBODY`; if the loader got one tensor alone (`apart`),
            under that tensor's name.
        reads: storages of the model whose elements the loader read.
        error: the error that the loader raised, or None.
        needs_values: True if it asked for the value of an element, which a meta tensor doesn't have.
        left: the model's attributes after the call (`PlainAttributes.read`).
    """

    def __init__(
        self,
        load: Load,
        memory: ModelMemory,
        metas: Sequence[Meta],
        apart: bool = False,
        attributes: PlainAttributes | None = None,
    ) -> None:
        nobody = metas[0].name if apart else NOBODY
        recorder = _Recorder(metas, memory.storages, nobody)
        self.records, self.reads, self.needs_values = recorder.records, recorder.reads, False
        self.error: Exception | None = None
        self.left: dict[Where, Any] = {}
        weights = [*recorder.tensors.items()]
        recorder.tensors.clear()
        try:
            with _Looks(recorder), recorder, torch.no_grad():
                load(weights)
            written = set().union(*[record.storages for record in self.records.values()])
            if recorder.needs_values or recorder.asked & written:
                recorder.needs_values, self.error = True, RuntimeError(ASKS)
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames hold the tensors, which `kept` would count as kept
        finally:
            recorder.put_back()
        if self.error is not None:
            self.needs_values = recorder.needs_values or _lacks_values(self.error)
            if apart:
                is_caught = str(self.error) == ASKS
                why = ASKS if is_caught else f"{REFUSED} {type(self.error).__name__}: {self.error}"
                self.records[nobody].comes_whole(why)
        del weights  # only what the loader keeps of it is alive now
        for name in [] if self.error is not None else recorder.kept(is_quick=apart):
            self.records[name].comes_whole("its loader keeps it")
            self.records[name].written |= memory.storages
        if memory.restore():
            self.records[nobody].comes_whole("its loader keeps it")
            self.records[nobody].written |= memory.storages
        if attributes is not None:
            self.left = attributes.read(recorder.has_made)

    @property
    def is_clear(self) -> bool:
        """True if the loader took all tensors, and each write is known to belong to one tensor.

        Fills without a tensor are fine, too, as long as they don't touch memory of a tensor that comes whole, or of a
        piece.
        """
        nobody = self.records[NOBODY] if NOBODY in self.records else Record()
        if self.error is not None or nobody.why is not None:
            return False
        unknown = set().union(*[record.storages for record in self.records.values() if record.why is not None])
        return not {storage_of(fill.view) for fill in nobody.fills} & (unknown | conflicts(self.records))


class Record:
    """What the loader was seen to do with one tensor.

    Attributes:
        pieces: for each box, where it begins in the tensor, and the view of the model that it goes to.
        fills: the constants that the loader writes meanwhile.
        why: the reason why it comes whole; None if it is direct.
        written: storages of the model that are written in a way that we don't know.
        did: the operations in which it took part, to compare calls.
        error: the error with which the loader refused it.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self.fills: list[Fill] = []
        self.why: str | None = None
        self.written: set[int] = set()
        self.did: list[int] = []
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

    def does_as(self, other: Record) -> bool:
        """True if the loader did the same with this tensor in another run, recorded in `other`. Fills aren't compared:
        when all tensors come in one call, no tensor is known to be their cause."""

        def said(record: Record) -> Any:
            """Return what is compared."""
            pieces = [(start, extent(view), view.dtype) for start, view in record.pieces]
            return record.why, pieces, record.written

        return bool(said(self) == said(other))


def fills_of(record: Record) -> set[tuple[Extent, str]]:
    """Return the places and values of a record's fills, to compare them."""
    return {(extent(fill.view), repr(fill.value)) for fill in record.fills}


def conflicts(records: Mapping[str, Record]) -> set[int]:
    """Return the storages in which pieces of direct tensors, and fills, overlap or may overlap. The loader's order of
    writing decides there, and a run keeps no order. Two fills of one value may overlap."""
    found = set[int]()
    views: list[tuple[torch.Tensor, Any]] = []
    for record in records.values():
        views += [(view, _PIECE) for _, view in record.pieces if record.why is None]
        views += record.fills
    open_: list[tuple[torch.Tensor, Any]] = []
    for view, value in sorted(views, key=lambda each: (storage_of(each[0]), extent(each[0]).begin)):
        begin = extent(view).begin
        open_ = [each for each in open_ if storage_of(each[0]) == storage_of(view) and extent(each[0]).end > begin]
        if any(_meet(other, view) and not (value is not _PIECE and value == its) for other, its in open_):
            found.add(storage_of(view))
        open_.append((view, value))
    return found


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two views may have an element in common; False only if they certainly have none."""
    first, second = extent(one), extent(other)
    if first.storage != second.storage or first.end <= second.begin or second.end <= first.begin:
        return False
    if one.element_size() != other.element_size() or one.stride() != other.stride():
        return True  # with other steps it takes more than a comparison of coordinates, so assume the worse
    # With equal strides both are boxes of one grid, unless they go on in its next row: they are apart if they are apart
    # along some dim.
    firsts = [each.storage_offset() for each in (one, other)]
    lasts = [at + sum([(n - 1) * s for n, s in zip(v.shape, v.stride())]) for at, v in zip(firsts, (one, other))]
    is_apart = False
    for step, *lengths in sorted(zip(one.stride(), one.shape, other.shape), reverse=True):
        starts, ends = [[at // step if step else 0 for at in each] for each in (firsts, lasts)]
        firsts, lasts = [[at - n * step for at, n in zip(*each)] for each in ((firsts, starts), (lasts, ends))]
        if any(end - start != length - 1 for start, end, length in zip(starts, ends, lengths)):
            return True
        is_apart |= ends[0] < starts[1] or ends[1] < starts[0]
    return not is_apart


class Extent(NamedTuple):
    """The bytes of a storage that a view spans: from `begin` to before `end`."""

    storage: int
    begin: int
    end: int
    steps: tuple[tuple[int, int], ...]  # of each dim of more than one element, its stride and its length


def extent(view: torch.Tensor) -> Extent:
    """Return the bytes of its storage that a view spans. A view without elements spans none."""
    size = view.element_size()
    steps = tuple([(step * size, length) for step, length in zip(view.stride(), view.shape) if length != 1])
    begin = view.storage_offset() * size
    last = sum([(length - 1) * step for step, length in steps])
    return Extent(storage_of(view), begin, begin + last + size if view.numel() else begin, steps)


class _Recorder(TorchDispatchMode):
    """Follows tensors through the operations of a loader, as a dispatch mode. Writes to the model are recorded and not
    done.

    Args:
        metas: the tensors that the loader gets.
        storages: of the model.
        nobody: the name under which operations are recorded in which no tensor takes part.

    Attributes:
        tensors: the tensors on meta that the loader gets, by name.
        records: what was seen, by name; under `nobody` what no tensor takes part in.
        reads: storages of the model whose elements were read.
        asked: of these, those of which a value was asked for, or of what was computed from them.
        needs_values: True if the value of an element was asked for.
    """

    def __init__(self, metas: Sequence[Meta], storages: set[int], nobody: str) -> None:
        super().__init__()
        self.tensors = {meta.name: meta.empty("meta") for meta in metas}
        self.records = {name: Record() for name in (*self.tensors, nobody)}
        self.reads: set[int] = set()
        self.asked: set[int] = set()
        self.needs_values = False
        self._derived: dict[int, set[int]] = {}  # by storage, the memory of the model of which it was computed
        self._fresh: set[int] = set()  # storages that the loader allocated
        self._outside: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory that is nobody's, and what it held
        self._storages, self._nobody = storages, nobody
        self._bases: dict[int, _Base] = {}
        self._zeroed: set[int] = set()  # of these, what the loader set to zero
        self._moved: set[str] = set()  # names of what went to a device, which is a copy here alone
        self._computed: dict[int, frozenset[str]] = {}  # by storage, the names of what it was computed from
        self._alive: list[torch.Tensor] = []  # else their storage's address might be another tensor's
        self._users: list[tuple[str, torch.Tensor, int]] = []
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            base = _Base(name, shape, tensor.stride(), (0,) * len(shape), tuple(range(len(shape))), (tensor.dtype,))
            self._follow(tensor, base)

    def _follow(self, tensor: torch.Tensor, base: _Base) -> None:
        """Remember that the storage of `tensor` holds `base`, and keep it alive during the run of the loader."""
        self._bases[storage_of(tensor)] = base
        own = tensor.detach()  # the loader's tensor itself isn't kept alive, so that it shows whether the loader does
        self._users.append((base.name, own, _users(own) - 1))

    def kept(self, is_quick: bool = False) -> list[str]:
        """Return the names of tensors that the loader still holds, or of which it holds a view or a copy: it may write
        them later. Call it when the loader has returned, and nobody else holds the tensors."""
        for generation in (None, 1) if is_quick else (None, 1, 2):
            # A function within the loader that calls itself is such a cycle, with all that it refers to.
            if generation is not None:
                gc.collect(generation)
            names = [name for name, tensor, users in self._users if _users(tensor) > users]
            if not names:
                break
        return [*dict.fromkeys(names)]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record what an operation does to tensors of the checkpoint and to the model, and return what it returns."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        names = {name for tensor in given for name in self._names(tensor)}
        written = _written(func, args, kwargs)
        into_model = {key for key in map(storage_of, written) if key in self._storages}
        if names or into_model:
            did = hash(repr((func, [*map(self._described, leaves)])))
            for name in names or (self._nobody,):
                self.records[name].did.append(did)
        if func is _aten.copy_.default and storage_of(args[1]) in self._bases and not self._names(args[0]):
            self._copied(args[0], args[1])
            return args[0]
        if into_model and not names and func in _FILLS:
            self._filled(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        if func is _aten.zero_.default and self._zeroes(args[0]):
            return args[0]
        if into_model or (names and written):
            self._reads(given, except_for=written)
            return self._wrote(func, args, kwargs, names, written, into_model)
        if func in _COPIES and names:
            return self._copy(args[0], kwargs)
        if written:
            self._writes_outside(func, args, written)
        return self._computes(func, args, kwargs, names, given, written)

    def _described(self, leaf: Any) -> Any:
        """What two calls are compared by. Of a tensor it has no values."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = extent(leaf) if storage_of(leaf) in self._storages else sorted(self._names(leaf))
        return place, leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset()

    def _reads(self, given: Iterable[torch.Tensor], except_for: Iterable[torch.Tensor] = ()) -> set[int]:
        """Note which memory of the model is read. Returns it, and that of which these tensors were computed."""
        read = {storage_of(tensor) for tensor in given} - {storage_of(tensor) for tensor in except_for}
        self.reads |= read & self._storages
        return (read & self._storages).union(*[self._derived.get(key, ()) for key in read])

    def _writes_outside(self, func: Any, args: tuple[Any, ...], written: Sequence[torch.Tensor]) -> None:
        """Note a write, in which no tensor of the checkpoint takes part, into memory that was there before and isn't
        the model's: a counter, a cache. It is done, since the loader may read it, and taken back by `put_back`."""
        outside = [tensor for tensor in written if storage_of(tensor) not in self._fresh]
        # self.w_kc.copy_(self.kv_b.weight[:3]): done again whenever that weight comes, which then comes whole.
        is_derived = func is _aten.copy_.default and storage_of(args[1]) in self._storages | self._derived.keys()
        if outside and not is_derived:
            self.records[self._nobody].comes_whole("its loader writes to memory that isn't the model's")
        for tensor in outside:
            if all(storage_of(tensor) != storage_of(saved) for saved, _ in self._outside):
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                self._outside.append((memory, memory.clone()))

    def put_back(self) -> None:
        """Give memory that isn't the model's the values that it had."""
        for memory, before in self._outside:
            memory.copy_(before)

    def has_made(self, tensor: torch.Tensor) -> bool:
        """True for tensors of the checkpoint, and for what was computed from them or from memory of the model."""
        key = storage_of(tensor)
        return key in self._bases or key in self._computed or key in self._derived

    def _names(self, tensor: torch.Tensor) -> Collection[str]:
        """Return the names of the checkpoint's tensors that `tensor` is a view of or was computed from; () for none."""
        base = self._bases.get(storage_of(tensor))
        return (base.name,) if base is not None else self._computed.get(storage_of(tensor), ())

    def _unknown(self, func: Any, names: Collection[str]) -> None:
        """Mark these tensors as whole, since the loader called an operation on them that `_Recorder` doesn't follow."""
        for name in names:
            self.records[name].comes_whole(f"its loader calls {func}")

    def _computes(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Collection[str],
        given: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> Any:
        """Run an operation that doesn't write to the model: on meta if it takes tensors of the checkpoint (`names`), or
        what the loader made where these are."""
        if names or (not written and any(tensor.is_meta for tensor in given)):
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or not _ASKING.isdisjoint(func.tags):
                self.needs_values = True
            raise
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if names:  # results are views of one tensor, or computed, so that it comes whole
            if func is _aten.view.dtype or not all(storage_of(leaf) in self._bases for leaf in made):
                self._unknown(func, names)
            self._mark(made, names)
        sources = {storage_of(tensor) for tensor in given}
        new = [leaf for leaf in made if storage_of(leaf) not in sources or func is _aten.lift_fresh.default]
        self._fresh |= {storage_of(leaf) for leaf in new}
        is_view = made and not new and not written
        if not is_view and not _reads_no_elements(func) and (read := self._reads(given)):
            for leaf in (*new, *written):
                self._derived[storage_of(leaf)] = read | self._derived.get(storage_of(leaf), set())
            self._alive += (*new, *written)
            if _asks(func, given):
                self.asked |= read
        return result

    def _mark(self, made: Sequence[torch.Tensor], names: Collection[str]) -> None:
        """Record that tensors were computed from tensors of the checkpoint."""
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
        is_copies = func is _aten._foreach_copy_.default and not any(map(self._names, args[0]))
        if is_copies and all(storage_of(source) in self._bases for source in args[1]):
            for target, source in zip(args[0], args[1]):
                self._copied(target, source)
            return None
        for name in names or (self._nobody,):
            self.records[name].comes_whole(f"its loader calls {func}")
            self.records[name].written |= into_model
        self._mark(written, names)
        if not into_model and all(tensor.is_meta for tensor in written):
            return func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))  # may change the shape
        returns = len(func._schema.returns)
        return written[0] if returns == 1 else tuple(written) if returns else None

    def _copy(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Do a copy or a cast of a tensor of the checkpoint, on meta, and return the result.

        If its elements make no box, the checkpoint's tensor is marked as whole.
        """
        is_moved = kwargs.get("device") is not None
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
        if is_moved and made.dtype == tensor.dtype:
            self._moved.add(base.name)
        if storage_of(tensor) in self._zeroed:
            self._zeroed.add(storage_of(made))
        return made

    def _zeroes(self, tensor: torch.Tensor) -> bool:
        """Note that a tensor of the checkpoint, or a copy of a box of it, is all zero from now on. False if `tensor` is
        another one, or a part."""
        base = self._bases.get(storage_of(tensor))
        if base is None or base.name in self._moved or not base.shows_all(tensor):
            return False
        self._zeroed.add(storage_of(tensor))
        return True

    def _filled(self, target: torch.Tensor, value: Any) -> None:
        """Record that the loader wrote a constant into memory of the model; nothing if `target` is empty."""
        if target.numel():
            self.records[self._nobody].fills.append(Fill(torch.Tensor.detach(target), value))

    def _copied(self, target: torch.Tensor, view: torch.Tensor) -> None:
        """Record a `copy_` from a tensor of the checkpoint, or from a view of it.

        Otherwise it is marked as whole, with the reason. A copy of no elements isn't recorded.
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
            if storage_of(view) in self._zeroed:
                self._filled(target, 0)
                return
            start, dims = box
            record.pieces.append((start, _in_order(torch.Tensor.detach(target), dims, len(start))))
            return
        record.written.add(storage_of(target))


class _Looks(TorchFunctionMode):
    """Notices when a loader looks at values without an operation that `_Recorder` sees, also if it catches the error
    that a tensor on meta raises."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS:
            self._recorder.asked |= self._recorder._reads(args[:1])
        elif func in _ADDRESSES and self._recorder._names(args[0]):
            self._recorder.needs_values = True
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if _lacks_values(error):
                self._recorder.needs_values = True
            raise


def _lacks_values(error: Exception) -> bool:
    return any(words in str(error) for words in _NO_VALUES)


def _asks(func: Any, given: Sequence[torch.Tensor]) -> bool:
    """True for an operation that tells values to the loader, perhaps as the shape of what it returns."""
    if func is _aten.index.Tensor and not any(each.dtype in (torch.bool, torch.uint8) for each in given[1:]):
        return False  # by numbers: the shape is theirs
    return not _ASKING.isdisjoint(func.tags)


def _reads_no_elements(func: Any) -> bool:
    """True for `empty_like`, `new_zeros` and others that look at a tensor's shape and type alone."""
    name = func._schema.name.split("::")[1]
    return name.startswith(("new_", "sym_")) or name.endswith("_like") or name == "is_same_size"


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
        """Return the box of the tensor that a view of this memory shows: where it begins, and for each dim of the view
        the dim of the tensor. None if the view isn't a box."""
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

    def shows_all(self, view: torch.Tensor) -> bool:
        """True if a view shows each element of this memory once, as it is."""
        return _is_plain(view, self) and self.box(view) is not None and view.numel() == math.prod(self.shape)


def _is_plain(view: torch.Tensor, base: _Base) -> bool:
    """True if a view shows the elements themselves: not conjugates, negatives, or their bits as another type."""
    return view.dtype == base.dtypes[-1] and not _is_turned(view)


def _is_turned(view: torch.Tensor) -> bool:
    """True for a conjugate or a negative view, whose memory has other values."""
    return view.is_conj() or view.is_neg()


def _on_meta(leaf: Any) -> Any:
    """Return a meta tensor in place of one with memory, since operators refuse to mix the two."""
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


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes, as its schema says."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return found


def _users(tensor: torch.Tensor) -> int:
    """Return how many tensors use its storage, plus a constant: only differences mean something."""
    return int(torch._C._storage_Use_Count(storage_of(tensor)))


class ModelMemory:
    """The parameters and buffers of a model, as they were when this was made.

    Attributes:
        storages: their storages.
        places: for each storage, the names and tensors of the parameters and buffers in it.
        device: the device of the first parameter that isn't on meta; torch's default device if there is none.
        homes_on_meta: by storage on meta, the names of the modules that have it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._slots = [*_slots(model)]
        tables = [(module, name, getattr(module, name)) for module in model.modules() for name in _TABLES]
        self._tables = [(module, name, table, {**table}) for module, name, table in tables]
        self._said = _names_and_shapes(model)
        self.storages = {storage_of(slot.data) for slot in self._slots}
        self._modules: dict[int, set[int]] = {}
        for slot in self._slots:
            self._modules.setdefault(id(slot.module), set()).add(storage_of(slot.data))
        self.places: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in named_tensors(model):
            self.places.setdefault(storage_of(tensor), []).append((name, tensor.detach()))
        devices = (slot.data.device for slot in self._slots if not slot.data.is_meta)
        self.device = next(devices, torch.get_default_device())
        self.homes_on_meta: dict[int, set[str]] = {}
        for name, module in model.named_modules():
            for tensor in _own_tensors(module):
                if tensor.is_meta:
                    self.homes_on_meta.setdefault(storage_of(tensor), set()).add(name)

    def tensors_of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Return the parameters and buffers that a module had when this was made."""
        return [slot.data for slot in self._slots if slot.module is module]

    def siblings(self, storages: set[int]) -> set[int]:
        """Return all storages of those modules that have at least one of these storages."""
        return set().union(*[own for own in self._modules.values() if own & storages])

    def restore(self) -> bool:
        """Put back the parameters, buffers and submodules that a loader replaced, removed or added, and parameters and
        buffers whose memory or shape it changed. Values that were written into their memory stay. Returns True if
        anything had to be put back."""
        replaced = False
        for module, name, table, before in self._tables:
            # del of a layer of a Sequential makes another table.
            is_same = getattr(module, name) is table and table.keys() == before.keys()
            if not is_same or any(table[key] is not value for key, value in before.items()):
                module.__dict__[name] = table
                table.clear()
                table.update(before)
                replaced = True
        for slot in self._slots:
            replaced |= slot.restore()
        return replaced

    @contextmanager
    def materialised(
        self, modules: Collection[torch.nn.Module], came: Mapping[int, torch.Tensor], device: torch.device
    ) -> Iterator[dict[int, torch.UntypedStorage]]:
        """Give modules the parameters and buffers that they had when this was made, with memory in place of meta: that
        of `came`, views by storage on meta, else new one. Yields the memory. Afterwards they have what they had."""
        real = {key: view.untyped_storage() for key, view in came.items()}
        given = {id(module) for module in modules}
        mine = [each for each in self._tables if id(each[0]) in given and each[1] != "_modules"]
        saved = [(module, name, {**getattr(module, name)}) for module, name, _, _ in mine]
        made: dict[int, torch.Tensor] = {}
        try:
            for module, name, _, recorded in mine:
                table = {}
                for key, tensor in recorded.items():
                    if tensor is not None and tensor.is_meta:
                        storage = storage_of(tensor)
                        if storage not in real:
                            real[storage] = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device=device)
                        # One parameter under two names stays one.
                        tensor = made.setdefault(id(tensor), as_on_meta(tensor, real[storage]))
                    table[key] = tensor
                set_table(module, name, table)
            yield real
        finally:
            for module, name, table in saved:
                set_table(module, name, table)

    def change(self, model: torch.nn.Module, storages: Collection[int]) -> str | None:
        """Say what has changed in the model since this was made, in words: a name, a shape or a type, or the address of
        one of these storages. None if nothing has."""
        now = _names_and_shapes(model)
        if now != self._said:
            differ = [name for name in {**self._said, **now} if self._said.get(name) != now.get(name)]
            return f"the model has other tensors: {listed(differ)}"
        here = {name: extent(tensor) for name, tensor in named_tensors(model)}
        for storage in storages:
            for name, tensor in self.places[storage]:
                if here[name] != extent(tensor):
                    return f"{name!r} of the model lies elsewhere"
        return None


class _Slot(NamedTuple):
    """A parameter or buffer of a module, as it was before the loader ran."""

    module: torch.nn.Module
    tensor: torch.Tensor
    data: torch.Tensor  # alive, so that its storage's address isn't another's
    grad: torch.Tensor | None
    kind: type
    attributes: dict[str, Any]
    requires_grad: bool

    def restore(self) -> bool:
        """Give the tensor the memory and shape that it had, and what `torch.utils.swap_tensors` takes."""
        tensor, data = self.tensor, self.data
        has_swapped = type(tensor) is not self.kind or tensor.__dict__ is not self.attributes
        if not has_swapped and extent(tensor) == extent(data) and tensor.shape == data.shape:
            return False
        if (tensor.device, tensor.dtype) == (data.device, data.dtype):
            tensor.data = data
        else:
            own = data.detach().requires_grad_(self.requires_grad)
            own.grad = self.grad
            torch.utils.swap_tensors(tensor, own)
        tensor.__class__, tensor.__dict__ = self.kind, self.attributes
        return True


def _slots(model: torch.nn.Module) -> Iterator[_Slot]:
    """Yield all parameters and buffers of a model, module by module. A tensor that two modules share comes twice."""
    for module in model.modules():
        for tensor in _own_tensors(module):
            grad = tensor.grad if tensor.is_leaf else None
            yield _Slot(module, tensor, tensor.detach(), grad, type(tensor), tensor.__dict__, tensor.requires_grad)


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each parameter and buffer. A tensor with several names comes under each."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _names_and_shapes(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the shape and the type of each parameter and buffer, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named_tensors(model)}


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a module, without those of its children."""
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)


def set_table(module: torch.nn.Module, name: str, values: Mapping[str, Any]) -> None:
    """Replace what a module has in one of its tables, such as "_parameters"."""
    table = getattr(module, name)
    table.clear()
    table.update(values)


def joined(homes: Mapping[str, Collection[str]]) -> list[tuple[list[str], set[str]]]:
    """Group names, each with its homes, so that no two groups share a home. Names without one are in none.

    >>> joined({"q": {"a"}, "o": {"b"}, "k": {"a"}, "skipped": set()})
    [(['o'], {'b'}), (['q', 'k'], {'a'})]
    """
    groups: list[tuple[list[str], set[str]]] = []
    of_home: dict[str, tuple[list[str], set[str]]] = {}
    for name, own in homes.items():
        if not own:
            continue
        others = {id(group): group for home in own if (group := of_home.get(home)) is not None}
        names = [each for group in others.values() for each in group[0]]
        group = [*names, name], set(own).union(*[group[1] for group in others.values()])
        groups = [*[each for each in groups if id(each) not in others], group]
        of_home |= dict.fromkeys(group[1], group)
    return groups


def storages(module: torch.nn.Module, recurse: bool = True) -> set[int]:
    """Return the storages of a module's parameters and buffers, as `find_landings` takes them in `unreliable`."""
    return {storage_of(tensor) for tensor in (*module.parameters(recurse), *module.buffers(recurse))}


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of a tensor, equal for all its views. Another storage may get the
    same number after this one is freed. `storages` returns these numbers."""
    return int(tensor.untyped_storage()._cdata)


def listed(names: Sequence[str]) -> str:
    """Return the first few names as text, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
