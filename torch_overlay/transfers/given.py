"""What a rank gives of a side: DTensors, plain tensors, which are replicas, and pieces, which are boxes of a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ..distributed.tensor._planner.regions import Box
from ._planner.memory import Memory, Part
from .trees import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    Called = str | tuple[str, ...]
    Names = Callable[[str], Called] | Mapping[str, Called] | None  # from a path of the source to the target's
    Given: TypeAlias = "DTensor | Plain | Pieces"

DIGESTED = 1 << 16  # numbers at a time, which stay near
_ODD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


class Plain:
    """A plain tensor, with what a transfer asks of a DTensor: a replica on each rank that gives it."""

    device_mesh = _spec = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._local_tensor = tensor

    @property
    def place(self) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole, and which box of it this is."""
        shape = tuple(self._local_tensor.shape)
        return shape, Box((0,) * len(shape), shape)


class Piece(Plain):
    """A plain tensor that holds a box of a whole. See `torch_overlay.piece`."""

    def __init__(self, local: torch.Tensor, shape: Sequence[int], start: Sequence[int]) -> None:
        if not isinstance(local, torch.Tensor) or isinstance(local, DTensor):
            raise TypeError(f"piece() needs a plain tensor, what this rank holds; got a {type(local).__name__}.")
        self.shape, self.start, length = tuple(shape), tuple(start), tuple(local.shape)
        if not len(self.shape) == len(self.start) == len(length):
            raise ValueError(
                f"A piece, its whole and its start have as many dims; got a piece of shape {length}, a whole of shape "
                f"{self.shape} and the start {self.start}."
            )
        if any(not 0 <= at <= at + part <= whole for at, part, whole in zip(self.start, length, self.shape)):
            raise ValueError(
                f"A piece of shape {length} that starts at {self.start} isn't inside a whole of shape {self.shape}."
            )
        super().__init__(local)

    @property
    def place(self) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole, and which box of it this is."""
        return self.shape, Box(self.start, tuple(self._local_tensor.shape))

    def __repr__(self) -> str:
        return f"piece({tuple(self._local_tensor.shape)}, {self.shape}, {self.start})"


class Pieces:
    """All pieces that a rank gives of one tensor."""

    device_mesh = _spec = None

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)


def own_tensors(tree: Any, side: str, names: Names = None) -> dict[str, Given]:
    """The tensors of one side, by name; one with several names stands there several times.

    Raises:
        TypeError: there is something else; None stands for a tensor that this rank has no part in.
        ValueError: two have one name.
    """
    found: dict[str, Given] = {}
    for path, leaf in leaves(tree, _are_pieces).items():
        if leaf is None:
            continue
        called = path if names is None else names(path) if callable(names) else names.get(path, path)
        several = called if isinstance(called, (tuple, list)) else (called,)
        if not all(isinstance(name, str) for name in several):
            raise TypeError(f"names gives {called!r} for {path!r}; it gives a name, or a tuple of names.")
        for name in several:
            if name in found:
                raise ValueError(f"Two tensors of the {side} are called {name!r}; names maps them to one name.")
            found[name] = _given(name, leaf, side)
    return found


def _given(name: str, leaf: Any, side: str) -> Given:
    if isinstance(leaf, torch.Tensor):
        problem = _immovable(leaf._local_tensor if isinstance(leaf, DTensor) else leaf)
        if problem is not None:
            raise TypeError(f"The {side} {name!r} {problem}.")
        return leaf if isinstance(leaf, DTensor) else Plain(leaf)
    if not isinstance(leaf, (Piece, tuple)):
        raise TypeError(_no_tensor(name, leaf, side))
    pieces = (leaf,) if isinstance(leaf, Piece) else leaf
    problems = filter(None, [_immovable(piece._local_tensor) for piece in pieces])
    for problem in problems:
        raise TypeError(f"A piece of the {side} {name!r} {problem}.")
    kinds = {(piece.shape, piece._local_tensor.dtype, piece._local_tensor.device.type) for piece in pieces}
    if len(kinds) > 1:
        said = ", and ".join(f"of a {str(dtype)[6:]} of shape {shape} on {device}" for shape, dtype, device in kinds)
        raise ValueError(f"The pieces of the {side} {name!r} belong to different tensors: {said}.")
    return Pieces(pieces)


def _no_tensor(name: str, leaf: Any, side: str) -> str:
    """What to say of something that is no tensor."""
    what = f"The {side} {name!r}" if name else f"The {side}"
    if isinstance(leaf, torch.nn.Module):
        return f"{what} is a module ({type(leaf).__name__}); a transfer takes tensors: give its state_dict()."
    if isinstance(leaf, Iterator):  # as named_parameters() gives it
        return f"{what} is a {type(leaf).__name__}; a transfer takes tensors by name: give dict(...) of its pairs."
    return f"{what} is a {type(leaf).__name__}; a transfer takes tensors."


def _immovable(local: torch.Tensor) -> str | None:
    """Why the values of a tensor aren't its elements in its own memory, in words; None if they are."""
    if local.is_quantized:  # its bytes viewed as whole numbers end the process
        return f"is quantised ({str(local.dtype)[6:]}), and its scales wouldn't travel: give int_repr() and the scales"
    if local.is_nested or local.layout is not torch.strided:
        how = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        return f"is {how}, and a transfer moves dense tensors: give the tensors that it holds, each with a name"
    is_wrapper = type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_wrapper and not isinstance(local, AsyncCollectiveTensor):
        kind = type(local).__name__
        return f"is a {kind}, and a transfer moves plain tensors: give those that it holds, each with a name"
    if local.is_meta:  # as FSDP2's before to_empty()
        return "is on meta and has no memory: materialise it first, as to_empty() does"
    return None


def _are_pieces(part: Any) -> bool:
    """A tuple of pieces is one tensor; an empty one is a part of the tree, as any other."""
    return isinstance(part, tuple) and bool(part) and all(isinstance(each, Piece) for each in part)


def settled(local: torch.Tensor) -> torch.Tensor:
    """A local tensor whose elements are there: what a collective still brings is waited for."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def part_of(name: str, box: Box, local: torch.Tensor) -> Part | None:
    """A box of a tensor in the memory of a local one; None if it is empty."""
    local = settled(local)
    if not local.numel():
        return None
    size = local.element_size()
    memory = Memory(local.data_ptr(), tuple(local.shape), tuple([size * stride for stride in local.stride()]), size)
    return Part(name, str(local.dtype), box, memory)


def digests_of(own: Given) -> list[tuple[Box, str]]:
    """Of what isn't a DTensor, each box with the digest of its values."""
    parts = own.pieces if isinstance(own, Pieces) else () if isinstance(own, DTensor) else (own,)
    return [(part.place[1], digest(part._local_tensor)) for part in parts]


def digest(tensor: torch.Tensor) -> str:
    """Of the bits of a tensor, the same on each device: a sum over eight bytes at a time, each mixed with its place."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # of one element strides may be any
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    places = torch.arange(1, min(whole // 8, DIGESTED) + 8, device=flat.device) * _ODD[0]
    found = []
    for some in (*flat[:whole].view(torch.int64).split(DIGESTED), flat[whole:].to(torch.int64)):
        # A sum of products alone takes a tensor and its negative for the same: the upper half comes down in between.
        mixed = (some ^ places[: len(some)]).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 32).mul_(_ODD[2])
        found.append(mixed.bitwise_xor_(mixed >> 29).sum())
    return hashlib.blake2b(repr([len(flat), *torch.stack(found).tolist()]).encode(), digest_size=16).hexdigest()
