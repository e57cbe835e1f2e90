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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.clone.default)


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

    def without(self, memory: set[int], why: str) -> None:
        """Let all come whole of which some lands in this memory, as `keys` gives it."""
        for name, boxes in list(self.direct.items()):
            if memory.intersection([_key(view) for _, view in boxes]):
                self.whole[name] = why
                del self.direct[name]


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
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        recorder = _Recorder(tensor, memory)
        try:
            with recorder, torch.no_grad():
                load([(meta.name, tensor)])
        except Exception as error:
            recorder.why = recorder.why or f"its loader ends with {type(error).__name__}: {error}"
            written |= memory
        if recorder.why is not None:
            found.whole[meta.name] = recorder.why
            written |= recorder.written
        elif recorder.landings:
            found.direct[meta.name] = tuple(recorder.landings)
    for name in _shared(found.direct):
        found.whole[name] = "another tensor goes to the same memory"
        written |= {_key(view) for _, view in found.direct.pop(name)}
    beside(found, model, written)
    return found


def beside(found: Landings, model: torch.nn.Module, written: set[int]) -> None:
    """Let come whole what goes to a module of which some memory is written by what comes whole."""
    for module in model.modules():
        own = keys(module, recurse=False)
        if own & written:
            found.without(own, "another tensor of its module comes whole")


def keys(module: torch.nn.Module, recurse: bool = True) -> set[int]:
    """The memory of a module."""
    return {_key(tensor) for tensor in (*module.parameters(recurse), *module.buffers(recurse))}


def _shared(direct: dict[str, tuple[Landing, ...]]) -> set[str]:
    """The tensors of which some land where others do: the loader says in which order."""
    owners: dict[object, set[str]] = {}
    for name, boxes in direct.items():
        for _, view in boxes:
            place = _key(view), view.storage_offset(), tuple(view.shape), view.stride()
            owners.setdefault(place, set()).add(name)
    return set().union(*[names for names in owners.values() if len(names) > 1])


class _Recorder(TorchDispatchMode):
    """Follows one tensor through what is done with it.

    Attributes:
        landings: what was to be copied into the model.
        why: what was done that isn't known; None if nothing was.
        written: memory of the model that would have been written.
    """

    def __init__(self, tensor: torch.Tensor, memory: set[int]) -> None:
        super().__init__()
        self.landings: list[Landing] = []
        self.why: str | None = None
        self.written: set[int] = set()
        self._shape, self._memory = tuple(tensor.shape), memory
        self._alive = [tensor]  # else its memory might be another tensor's
        self._whole = _Source(self._shape, tensor.stride(), 0)
        self._known = {_key(tensor): self._whole}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if _key(tensor) in self._known]
        written = args[0] if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) else None
        if written is not None:
            self.written.add(_key(written))
        if func is _aten.copy_.default and known and written is not known[0]:
            self._copied(written, args[1])  # type: ignore[arg-type]
            return written
        if written is not None and _key(written) in self._memory:
            if known:
                self.why = self.why or f"its loader calls {func}"
            return written  # nothing of the model changes now
        if func in _COPIES and known:
            return self._copy(args[0], kwargs.get("dtype"))
        result = func(*args, **kwargs)
        if known and not all(_key(leaf) in self._known for leaf in tree_leaves(result) if _is_tensor(leaf)):
            self.why = self.why or f"its loader calls {func}"
        return result

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A copy, of another type or on another device perhaps, stands for what it was made from."""
        made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        source = self._known[_key(tensor)]
        if source == self._whole:
            self._known[_key(made)] = _Source(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        else:
            self.why = self.why or "its loader copies it twice"
            self._known[_key(made)] = source
        self._alive.append(made)
        return made

    def _copied(self, target: torch.Tensor, view: torch.Tensor) -> None:
        box = self._box(view)
        if _key(target) not in self._memory:
            self.why = self.why or "its loader copies it to memory that isn't the model's"
        elif box is None or target.shape != view.shape:
            self.why = self.why or "its loader takes elements that make no box"
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


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
