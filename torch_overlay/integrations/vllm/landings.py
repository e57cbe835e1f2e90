"""Landings: where a model's own loader puts each tensor of a checkpoint.

The loader is run once on tensors without memory, and what it would copy into the model is written down, not copied. A
tensor of which it only takes views (a shard, the part of a fused weight, the expert's row, what lies beside padding)
lands in boxes that we know, whatever the loader's rules are. One that it calculates with, looks into or refuses has to
come whole, and the loader gets it then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_overlay.transfers.descriptions import CASTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
_REFUSES = "its loader ends with"
_NO_VALUES = "meta device", "unallocated storage"  # what numpy() and tolist() say of a tensor without memory
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)


class Meta(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Landing(NamedTuple):
    """A box of a tensor of a checkpoint, and the memory of the model that it goes to.

    Attributes:
        start: where the box begins in the tensor.
        view: of the model; has the box's lengths.
    """

    start: tuple[int, ...]
    view: torch.Tensor


class Landings(NamedTuple):
    """What a loader does.

    Attributes:
        direct: by name, where the tensor's boxes go. Of one that this rank doesn't want there is nothing.
        whole: by name, why the loader has to get the tensor itself.
    """

    direct: dict[str, tuple[Landing, ...]]
    whole: dict[str, str]

    def without(self, memory: set[int], why: str) -> set[int]:
        """Let all come whole of which some lands in this memory, as `keys` gives it; returns all memory of these."""
        also = set[int]()
        for name, boxes in list(self.direct.items()):
            its = {_key(view) for _, view in boxes}
            if memory & its:
                self.whole[name] = why
                del self.direct[name]
                also |= its
        return also


class _Source(NamedTuple):
    """What memory stands for: a tensor of the checkpoint, or a view of one that was copied, in this order."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def landings(load: Load, model: torch.nn.Module, metas: Iterable[Meta]) -> Landings:
    """Ask a loader, `model.load_weights` say, one tensor after the other.

    What comes whole is loaded module by module: so all that goes to a module does, if some of it does. Where the loader
    refuses a tensor, nobody knows its module, and all come whole.
    """
    memory, found, written = keys(model), Landings({}, {}), set[int]()
    for meta in metas:
        recorder = _Recorder(torch.empty(meta.shape, dtype=meta.dtype, device="meta"), memory)
        try:
            with recorder, torch.no_grad():
                load([(meta.name, recorder.tensor)])
        except Exception as error:
            recorder.why = recorder.why or f"{_REFUSES} {type(error).__name__}: {error}"
            written |= memory
        if recorder.is_kept or keys(model) != memory:
            recorder.why = recorder.why or "its loader keeps it"
            written |= memory
        if recorder.why is not None:
            found.whole[meta.name] = recorder.why
            written |= recorder.written
        elif recorder.landings:
            found.direct[meta.name] = tuple(recorder.landings)
    written |= found.without(_shared(found.direct), "another tensor goes to the same memory")
    beside(found, model, written)
    return found


def refusal(load: Load, model: torch.nn.Module, metas: Sequence[Meta], found: Landings) -> str | None:
    """Which tensor a loader refuses of those that come whole, and how, in words; None if it takes them all, or if
    nobody can tell without values.

    Asked with all of them in one call, as in a round: a loader that counts what came refuses each tensor that comes
    alone, and takes all of them. One that is given a name that it doesn't know would raise in each round.
    """
    if not found.whole:
        return None
    last = ""

    def given() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal last
        for meta in metas:
            if meta.name in found.whole:
                last = meta.name
                yield meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")

    only_asks = _OnlyAsks(keys(model))
    try:
        with only_asks, torch.no_grad():
            load(given())
    except Exception as error:
        if only_asks.needs_values or any(words in str(error) for words in _NO_VALUES):
            return None
        # A loader that sorts its tensors has read to the last one when it raises.
        refused = [name for name, why in found.whole.items() if why.startswith(_REFUSES)]
        who = [last] if last in refused or not refused else refused
        return f"refuses {', '.join(map(repr, who[:5]))}, with {type(error).__name__}: {error}"
    return None


class _OnlyAsks(TorchDispatchMode):
    """Runs a loader on meta tensors, and leaves the model's memory as it is.

    Attributes:
        needs_values: whether it asked for the value of an element, which a meta tensor doesn't have.
    """

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self.needs_values, self._memory = False, memory

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if any(_key(tensor) in self._memory for tensor in written):
            return written[0]
        if func is _aten.copy_.default and args[1].is_meta:
            return args[0]
        if func is _aten._to_copy.default and args[0].is_meta:  # to the host or a GPU: has no values there, either
            return torch.empty_like(args[0], dtype=kwargs.get("dtype"))
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            if isinstance(error, NotImplementedError) or not asks.isdisjoint(func.tags):
                self.needs_values = True
            raise


def beside(found: Landings, model: torch.nn.Module, written: set[int]) -> None:
    """Let come whole what goes to a module of which some memory is written by what comes whole, and so on."""
    modules = [keys(module, recurse=False) for module in model.modules()]
    more = written
    while more:
        own = set().union(*[each for each in modules if each & more])
        more = found.without(own, "another tensor of its module comes whole")


def _shared(direct: dict[str, tuple[Landing, ...]]) -> set[int]:
    """The memory of which some place belongs to two landings: the loader says in which order."""
    found = set[int]()
    open_: list[torch.Tensor] = []
    views = [view for boxes in direct.values() for _, view in boxes]
    for view in sorted(views, key=lambda view: (_key(view), view.storage_offset())):
        open_ = [other for other in open_ if _key(other) == _key(view) and _end(other) > view.storage_offset()]
        if any(_meet(other, view) for other in open_):
            found.add(_key(view))
        open_.append(view)
    return found


def _end(view: torch.Tensor) -> int:
    """Where a view ends in its memory, in elements."""
    return view.storage_offset() + 1 + sum([(n - 1) * step for n, step in zip(view.shape, view.stride())])


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views have an element in common, or may have."""
    if _key(one) != _key(other) or _end(one) <= other.storage_offset() or _end(other) <= one.storage_offset():
        return False
    if one.stride() != other.stride():
        return True
    left = [one.storage_offset(), other.storage_offset()]
    for step, *lengths in sorted(zip(one.stride(), one.shape, other.shape), reverse=True):
        starts = [at // step if step else 0 for at in left]
        left = [at - start * step for at, start in zip(left, starts)]
        if starts[0] + lengths[0] <= starts[1] or starts[1] + lengths[1] <= starts[0]:
            return False
    return True


def keys(module: torch.nn.Module, recurse: bool = True) -> set[int]:
    """The memory of a module."""
    return {_key(tensor) for tensor in (*module.parameters(recurse), *module.buffers(recurse))}


class _Recorder(TorchDispatchMode):
    """Follows one tensor through what is done with it.

    Attributes:
        landings: what was to be copied into the model.
        why: what was done that isn't known; None if nothing was.
        written: memory of the model that would have been written.
    """

    def __init__(self, tensor: torch.Tensor, memory: set[int]) -> None:
        super().__init__()
        self.tensor = tensor
        self.landings: list[Landing] = []
        self.why: str | None = None
        self.written: set[int] = set()
        self._shape, self._memory = tuple(tensor.shape), memory
        self._copies: list[torch.Tensor] = []  # alive, else their memory might be another tensor's
        self._whole = _Source(self._shape, tensor.stride(), 0)
        self._known = {_key(tensor): self._whole}
        self._users = _users(tensor)

    @property
    def is_kept(self) -> bool:
        """Whether the loader still has a view of the tensor or of a copy."""
        return any(_users(tensor) > self._users for tensor in (self.tensor, *self._copies))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = any(_key(leaf) in self._known for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf))
        written = _written(func, args, kwargs)
        self.written |= {_key(tensor) for tensor in written}
        if func is _aten.copy_.default and _key(args[1]) in self._known and _key(args[0]) not in self._known:
            self._copied(args[0], args[1])
            return args[0]
        if any(_key(tensor) in self._known for tensor in written):
            self._unknown(func)  # it changes what comes
        elif any(_key(tensor) in self._memory for tensor in written):
            if known or func not in _FILLS or any(_meet(args[0], view) for _, view in self.landings):
                self._unknown(func)
            return written[0]  # nothing of the model changes now
        if func in _COPIES and known:
            return self._copy(args[0], kwargs.get("dtype"))
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
        if known and (func is _aten.view.dtype or not all(_key(leaf) in self._known for leaf in made)):
            self._unknown(func)
        return result

    def _unknown(self, func: Any) -> None:
        self.why = self.why or f"its loader calls {func}"

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A copy, of another type or on another device perhaps, stands for what it was made from."""
        made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        source = self._known[_key(tensor)]
        if source == self._whole:
            self._known[_key(made)] = _Source(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        else:
            self.why = self.why or "its loader copies it twice"
            self._known[_key(made)] = source
        self._copies.append(made)
        return made

    def _copied(self, target: torch.Tensor, view: torch.Tensor) -> None:
        box, types = self._box(view), (self.tensor.dtype, target.dtype)
        if _key(target) not in self._memory:
            self.why = self.why or "its loader copies it to memory that isn't the model's"
        elif view.dtype not in types or (
            types[0] != types[1] and not CASTS.issuperset([str(each)[6:] for each in types])
        ):
            self.why = self.why or "its loader makes another type of it"
        elif box is None or target.shape != view.shape:
            self.why = self.why or "its loader takes elements that make no box"
        elif any(_meet(target, other) for _, other in self.landings):
            self.why = self.why or "its loader writes one place twice"
        elif view.numel():
            start, dims = box
            self.landings.append(Landing(start, _in_order(torch.Tensor.detach(target), dims, len(self._shape))))

    def _box(self, view: torch.Tensor) -> tuple[tuple[int, ...], list[int | None]] | None:
        """Where in the checkpoint's tensor a view begins, and which dim of it each of the view's is; None for one of
        length 1, and in all if it is no box."""
        source = self._known[_key(view)]
        size, stride, offset = tuple(view.shape), view.stride(), view.storage_offset()
        if source != self._whole:
            if (size, offset) != (source.size, 0) or not view.is_contiguous():
                return None
            size, stride, offset = source
        whole = self._whole.stride
        start, left = [], offset
        for length, step in zip(self._shape, whole):
            start.append(left // step if length > 1 else 0)
            left -= start[-1] * step
        dims: list[int | None] = []
        for length, step in zip(size, stride):
            fits = [dim for dim, each in enumerate(whole) if each == step and self._shape[dim] > 1]
            if length > 1 and (len(fits) != 1 or fits[0] in dims or start[fits[0]] + length > self._shape[fits[0]]):
                return None
            dims.append(fits[0] if length > 1 else None)
        return (tuple(start), dims) if not left else None


def _in_order(view: torch.Tensor, dims: Sequence[int | None], ndim: int) -> torch.Tensor:
    """A view of the model with the dims of the checkpoint's tensor, in its order."""
    for at in reversed([at for at, dim in enumerate(dims) if dim is None]):
        view = view.squeeze(at)
    places = [dim for dim in dims if dim is not None]
    view = view.permute(sorted(range(len(places)), key=places.__getitem__))
    for dim in range(ndim):
        if dim not in places:
            view = view.unsqueeze(dim)
    return view


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function changes, as its schema says."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += [leaf for leaf in tree_leaves(given) if _is_tensor(leaf)]
    return found


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _users(tensor: torch.Tensor) -> int:
    """How many tensors have its memory, and a constant more."""
    return int(torch._C._storage_Use_Count(_key(tensor)))
