"""What a rank may give as a tensor: a DTensor, a plain tensor, or pieces of a larger one. Start at `own_tensors`.

A tensor that tells `torch.distributed.checkpoint` its boxes, and a DTensor with several boxes on a rank, are read as
pieces, too. At the end: the memory of a local
tensor, and digests of its values.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..distributed.tensor._chunks import AMBIGUOUS, Cut, Run, cut_runs, is_ambiguous
from ..distributed.tensor._planner.boxes import Box
from ..distributed.tensor._planner.regions import NotPlanned
from ..distributed.tensor._runner.specs import read_cuts
from ._planner.memory import HeldBox, Memory
from .trees import leaves, names_for, with_paths

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from collections.abc import Set as AbstractSet
    from typing import TypeAlias

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from .trees import Names

    Given: TypeAlias = "DTensor | Plain | Pieces"


class Plain:
    """A plain tensor, with the attributes that a transfer reads of a DTensor. Each rank that gives it has all of it."""

    device_mesh = _spec = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._local_tensor = tensor

    @property
    def shape_and_box(self) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole tensor, and the box of it that this rank gives: for a plain tensor, all of it."""
        shape = tuple(self._local_tensor.shape)
        return shape, Box((0,) * len(shape), shape)


class Piece(Plain):
    """A plain tensor that holds a box of a larger one. See `torch_overlay.piece` for the arguments.

    Raises:
        TypeError: `local` is no plain tensor.
        ValueError: the box isn't inside the whole, or has another number of dims.
    """

    def __init__(self, local: torch.Tensor, shape: Sequence[int], start: Sequence[int]) -> None:
        if not isinstance(local, torch.Tensor) or isinstance(local, DTensor):
            raise TypeError(f"piece() needs a plain tensor, what this rank holds; got a {type(local).__name__}.")
        try:
            self.shape, self.start = (tuple([operator.index(each) for each in given]) for given in (shape, start))
        except TypeError:
            said = f"got shape {shape!r} and start {start!r}"
            raise TypeError(f"piece() takes a shape and a start of whole numbers, one for each dim; {said}.") from None
        length = tuple(local.shape)
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
    def local(self) -> torch.Tensor:
        """The tensor that holds the box."""
        return self._local_tensor

    @property
    def shape_and_box(self) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole tensor, and the box of it that this piece holds."""
        return self.shape, Box(self.start, tuple(self._local_tensor.shape))

    def __repr__(self) -> str:
        return piece_text(*self.shape_and_box)


def piece_text(shape: tuple[int, ...], box: Box) -> str:
    """Write a piece as a call of `piece`, for errors.

    >>> piece_text((8, 6), Box((4, 0), (4, 6)))
    'piece((4, 6), (8, 6), (4, 0))'
    """
    return f"piece({box.length}, {shape}, {box.start})"


class Slab(NamedTuple):
    """A box of the whole tensor that a tensor says it holds: where it begins, its shape, and where in the local tensor
    it begins. None for the last: `__get_tensor_shard__` gives it, or it is all of the local tensor."""

    start: tuple[int, ...]
    length: tuple[int, ...]
    local_start: tuple[int, ...] | None

    def __str__(self) -> str:
        at = "" if self.local_start is None else f" (at {self.local_start} of the local tensor)"
        return f"a part of shape {self.length} that begins at {self.start}{at}"


class Chunk(Piece):
    """A piece that a tensor itself says it holds, see `_slabs`. Each run asks again, and reads the local tensor again.

    Megatron-FSDP attaches a chunk list to the local tensors of its DTensors, because it cuts their rows where no
    placement of torch's does. FlexShard's tensors have the fields of torch's CheckpointableTensor. Of transformers'
    fused gate and up projections under tensor parallelism, a `_StridedShard(0, split_factor=2)`, rank 0 of 2 has rows
    0, 1, 4, 5 of 8.

    Raises:
        ValueError: the part doesn't have the shape that the tensor says, or isn't inside the whole.
    """

    def __init__(self, owner: torch.Tensor, name: str, number: int, shape: Sequence[int], slab: Slab) -> None:
        self.owner, self._name, self._number, self._slab = owner, name, number, slab
        self.start = slab.start
        local = self._local_tensor
        if tuple(local.shape) != slab.length:
            held = tuple(tensor_with_chunks(owner).shape)
            raise ValueError(
                f"{name!r} says that it holds {slab}, and its local tensor has shape {held}. Say with piece() what it "
                "holds."
            )
        self.shape = Piece(local, shape, self.start).shape  # checks that the box is inside

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        local, (_, length, starts) = tensor_with_chunks(self.owner), self._slab
        if starts is not None:
            # Where it has become too short, the part does, too, and `BoundTensor.problem` says so.
            part = tuple([slice(start, start + size) for start, size in zip(starts, length)])
            return settled(local).detach()[part[: local.ndim]]
        find = getattr(local, "__get_tensor_shard__", None)
        if find is None:
            return local
        from torch.distributed.checkpoint.metadata import MetadataIndex  # imports all of DCP, in 0.1 s

        shard: torch.Tensor = find(MetadataIndex(self._name, self.start, self._number))
        return shard

    @property
    def moved_text(self) -> str | None:
        """How what the tensor holds has changed since the transfer was made, in words; None if this piece is the same.
        The words go before "when the Transfer was made"."""
        try:
            slabs = _slabs(self._name, self.owner) or ()
        except ValueError as error:
            return f"changed ({error}) and was {self._slab}"
        now = slabs[self._number] if self._number < len(slabs) else "none of the parts that it lists"
        return None if now == self._slab else f"is {now} and was {self._slab}"


FIELDS = ("global_offsets", "local_offsets", "local_sizes")  # and global_shape: torch's CheckpointableTensor


def _slabs(name: str, tensor: torch.Tensor) -> list[Slab] | None:
    """Return the boxes that a tensor itself says this rank holds; None if it says nothing, or has a pending
    reduction."""
    is_dtensor, local = isinstance(tensor, DTensor), tensor_with_chunks(tensor)
    if hasattr(local, "__create_chunk_list__"):
        if is_dtensor and any(placement.is_partial() for placement in tensor.placements):
            return None
        chunks: list[ChunkStorageMetadata] = local.__create_chunk_list__()
        return [Slab(tuple(chunk.offsets), tuple(chunk.sizes), None) for chunk in chunks]
    if is_dtensor:
        return _strided_slabs(name, tensor)
    if not hasattr(tensor, "global_shape") or not all(hasattr(tensor, field) for field in FIELDS):
        return None
    fields = [[tuple(box) for box in getattr(tensor, field)] for field in FIELDS]
    if len({*map(len, fields)}) > 1:
        raise ValueError(f"{name!r} has global_offsets, local_offsets and local_sizes of different numbers of shards.")
    return [Slab(start, length, local_start) for start, local_start, length in zip(*fields)]


def _strided_slabs(name: str, tensor: DTensor) -> list[Slab] | None:
    """Return the boxes that this rank holds of a DTensor that `strided_cuts` reads; None for others."""
    cuts = strided_cuts(tensor._spec, repr(name))
    if cuts is None:
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    runs = runs_at(cuts, tuple(tensor.shape), coordinate)
    require_lengths(tensor, runs, repr(name))
    boxes = itertools.product(*[of_dim or (Run(0, 0, 0),) for of_dim in runs])
    return [
        Slab(*[tuple([getattr(run, field) for run in box]) for field in ("offset", "length", "local_offset")])
        for box in boxes
    ]


def strided_cuts(spec: DTensorSpec, called: str) -> tuple[Cut, ...] | None:
    """Return how the axes of a mesh cut a tensor with a lone strided shard, in turn, each with its axis in place of a
    coordinate. None for other specs, and for placements of other classes. ValueError where two readings differ."""
    placements, kinds = spec.placements, tuple(map(type, spec.placements))
    if _StridedShard not in kinds or not {*kinds} <= {Replicate, Shard, _StridedShard}:
        return None
    order = getattr(spec, "shard_order", None)
    cuts = _cuts(placements, kinds, order, spec.ndim, tuple(spec.mesh.shape))
    if cuts is not None and is_ambiguous(spec.shape, cuts):
        raise ValueError(
            f"The placements of {called}, {placements}, {AMBIGUOUS} A Transfer takes a piece() for each box."
        )
    return cuts


def runs_at(cuts: Sequence[Cut], shape: tuple[int, ...], coordinate: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    """Return for each dim the runs that a coordinate holds by `strided_cuts`."""
    return cut_runs(shape, tuple([cut._replace(coordinate=coordinate[cut.coordinate]) for cut in cuts]))


def require_lengths(tensor: DTensor, runs: Sequence[Sequence[Run]], called: str) -> None:
    """Raise ValueError if the local tensor hasn't the shape of these runs."""
    held, needed = tuple(tensor._local_tensor.shape), lengths_of(runs)
    if held != needed:
        raise ValueError(
            f"{called} has shape {held} on this rank, where {tensor.placements} say {needed}: say with piece() what it "
            "holds"
        )


def lengths_of(runs: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    """Return the shape of the local tensor."""
    return tuple([sum([run.length for run in of_dim]) for of_dim in runs])


@lru_cache(maxsize=1024)  # the kinds are a part of the key: a subclass of Shard may compare equal to it
def _cuts(placements: Any, kinds: Any, order: Any, ndim: int, sizes: tuple[int, ...]) -> tuple[Cut, ...] | None:
    """See `strided_cuts`. None also if all dims are chunks of chunks, as of FSDP2 x TP."""
    with contextlib.suppress(NotPlanned):
        read_cuts(placements, order, ndim, sizes)
        return None
    cuts: list[Cut] = []
    for dim in range(ndim):
        on_dim = tuple([each if getattr(each, "dim", None) == dim else Replicate() for each in placements])
        try:
            # FSDP2 cuts what TP left. For some lengths the placements say another thing, in the order of the mesh.
            cuts += [Cut(dim, 1, sizes[axis], axis) for axis in read_cuts(on_dim, None, ndim, sizes).orders[dim]]
        except NotPlanned:
            cuts += [
                Cut(dim, getattr(each, "split_factor", 1), sizes[axis], axis)
                for axis, each in enumerate(on_dim)
                if type(each) is not Replicate and sizes[axis] > 1
            ]
    return tuple(cuts)


def tensor_with_chunks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose chunk list counts: a DTensor's local tensor, else the tensor itself.

    A DTensor has a chunk list of its own, which torch makes of its placements. It says nothing new.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _chunks_of(name: str, tensor: torch.Tensor, slabs: Sequence[Slab]) -> tuple[Chunk, ...]:
    """Return the pieces that a tensor says this rank has; none if it says that it has none."""
    if not slabs:
        return ()
    shape = tensor.shape if isinstance(tensor, DTensor) else getattr(tensor, "global_shape", None)
    if shape is None:
        # Not the tensor's own shape, which may be that of its part or that of the whole.
        items = tensor.__create_write_items__(name, tensor) if hasattr(tensor, "__create_write_items__") else []
        sizes = {tuple(item.tensor_data.size) for item in items if item.tensor_data is not None}
        if len(sizes) != 1:
            raise ValueError(
                f"{name!r} is no DTensor, and has a chunk list, and no write items that say the shape of the whole. "
                "Say with piece() what it holds."
            )
        (shape,) = sizes
    is_whole = slabs[0].local_start is None and not hasattr(tensor_with_chunks(tensor), "__get_tensor_shard__")
    if len(slabs) > 1 and is_whole:
        raise ValueError(
            f"{name!r} has a chunk list of {len(slabs)} chunks, and no __get_tensor_shard__ that gives them. Say with "
            "piece() what it holds."
        )
    return tuple([Chunk(tensor, name, number, shape, slab) for number, slab in enumerate(slabs)])


class Pieces:
    """All pieces of one tensor that a rank gives."""

    device_mesh = _spec = None

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)


def own_tensors(tree: Any, side: str, names: Names = None, on_meta: Collection[str] = ()) -> dict[str, Given]:
    """Collect the tensors that this rank gives on one side, by name; those that may be on meta are `on_meta`. With
    `names=` one tensor may have several names."""
    tensors: dict[str, Given] = {}
    for path, leaf in leaves(tree, is_pieces).items():
        if leaf is None:
            continue
        for name in names_for(path, names):
            if name in tensors:
                raise ValueError(f"Two tensors of the {side} are called {name!r}; names maps them to one name.")
            try:
                given = _as_given(name, leaf, side, name in on_meta)
            except (TypeError, ValueError) as error:
                if name == path:
                    raise
                raise type(error)(with_paths(str(error), {name: path})) from error
            # An empty chunk list means that this rank has no part, as None does.
            if not isinstance(given, Pieces) or given.pieces:
                tensors[name] = given
    return tensors


def copied_sources(tree: Any, names: Names, only: AbstractSet[str] | None, room: int) -> dict[str, Any]:
    """Return the tree of a source, by path, with copies of the tensors that go to the names `only`; all, if None.

    Raises:
        ValueError: they take more than `room` bytes.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id; with the original, which keeps the id

    def copy(local: torch.Tensor) -> torch.Tensor:
        local = settled(local)
        if id(local) not in made:
            if sum([one.nbytes for one, _ in made.values()]) + local.nbytes > room:
                raise ValueError(f"copies of the sources take more than {room} bytes")
            made[id(local)] = local, local.detach().clone()
        return made[id(local)][1]

    copies: dict[str, Any] = {}
    for path, leaf in leaves(tree, is_pieces).items():
        copies[path], called = leaf, () if leaf is None else names_for(path, names)
        if called and (only is None or not only.isdisjoint(called)):
            given = _as_given(called[0], leaf, "source", False)
            if isinstance(given, DTensor):
                copies[path] = DTensor(copy(given._local_tensor), given._spec, requires_grad=False)
            elif isinstance(given, Plain):
                copies[path] = copy(given._local_tensor)
            else:
                pieces = [Piece(copy(each._local_tensor), each.shape, each.start) for each in given.pieces]
                copies[path] = tuple(pieces) or None
    return copies


def _as_given(name: str, leaf: Any, side: str, may_be_on_meta: bool) -> Given:
    """Turn a leaf into a DTensor, a `Plain` or `Pieces`."""
    slabs = _slabs(name, leaf) if isinstance(leaf, torch.Tensor) else None
    if slabs is not None:
        leaf = _chunks_of(name, leaf, slabs)
    if isinstance(leaf, torch.Tensor):
        problem = _why_immovable(leaf._local_tensor if isinstance(leaf, DTensor) else leaf, may_be_on_meta)
        if problem is None:
            problem = _why_apart(leaf) if isinstance(leaf, DTensor) else _why_not_whole(leaf)
        if problem is not None:
            raise TypeError(f"The {side} {name!r} {problem}.")
        return leaf if isinstance(leaf, DTensor) else Plain(leaf)
    if not isinstance(leaf, (Piece, tuple)):
        raise TypeError(_no_tensor_text(name, leaf, side))
    pieces = (leaf,) if isinstance(leaf, Piece) else leaf
    for piece in pieces:
        problem = _why_immovable(piece._local_tensor, may_be_on_meta)
        if problem is not None:
            raise TypeError(f"A piece of the {side} {name!r} {problem}.")
    locals_ = [piece._local_tensor for piece in pieces]
    device = next((local.device.type for local in locals_ if not local.is_meta), "meta")
    devices = [device if local.is_meta else local.device.type for local in locals_]
    kinds = {(piece.shape, local.dtype, at) for piece, local, at in zip(pieces, locals_, devices)}
    if len(kinds) > 1:
        said = ", and ".join(f"of a {str(dtype)[6:]} of shape {shape} on {device}" for shape, dtype, device in kinds)
        raise ValueError(f"The pieces of the {side} {name!r} belong to different tensors: {said}.")
    return Pieces(pieces)


def _no_tensor_text(name: str, leaf: Any, side: str) -> str:
    """Write the error for a leaf that is no tensor, with what to give instead."""
    subject = f"The {side} {name!r}" if name else f"The {side}"
    if isinstance(leaf, torch.nn.Module):
        give = "dict(module.named_parameters())"
        return f"{subject} is a module ({type(leaf).__name__}); a transfer takes tensors: give {give}."
    if isinstance(leaf, Iterator):  # as model.named_parameters() gives it
        return f"{subject} is a {type(leaf).__name__}; a transfer takes tensors by name: give dict(...) of its pairs."
    if isinstance(leaf, (str, os.PathLike)):
        return f"{subject} is a path; a transfer takes tensors, or torch_overlay.checkpoint(path) as the source."
    return f"{subject} is a {type(leaf).__name__}; a transfer takes tensors."


def _why_apart(tensor: DTensor) -> str | None:
    """Say why a part of another DTensor doesn't share its memory; None if it does, or is no part of one.

    A slice of a sharded dim has been gathered: writing it would leave the sharded tensor as it was, and reading it
    again would bring the values of then.
    """
    base = tensor._base
    if not isinstance(base, DTensor):
        return None
    own, its = (settled(each._local_tensor).untyped_storage()._cdata for each in (tensor, base))
    return (
        None
        if own == its
        else (
            "is a part of another DTensor, and has memory of its own, as a slice of a sharded dim has: give the whole "
            "DTensor, or a piece() of its to_local()"
        )
    )


def _why_not_whole(tensor: torch.Tensor) -> str | None:
    """Say why a plain tensor is no whole one: FlexShard's parameters are shards, marked by an attribute."""
    shape = getattr(tensor, "_global_shape", None)
    if shape is None or tuple(shape) == tuple(tensor.shape):
        return None
    return (
        f"is FlexShard's shard of a tensor of shape {tuple(shape)}, and doesn't say which part: give a state dict "
        "after set_state_dict_global_layouts(model, state_dict), or say with piece() what it holds"
    )


def _why_immovable(local: torch.Tensor, may_be_on_meta: bool) -> str | None:
    """Say why a tensor's values aren't the elements in its memory, which alone are moved; None if they are."""
    if local.is_quantized:
        # Viewing its bytes as integers, as exchanges do, ends the process.
        return f"is quantised ({str(local.dtype)[6:]}), and its scales wouldn't travel: give int_repr() and the scales"
    if local.is_nested or local.layout is not torch.strided:
        how = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        return f"is {how}, and a transfer moves dense tensors: give the tensors that it holds, each with a name"
    # A subclass that only adds attributes (a Parameter, say) keeps torch's dispatch; a wrapper, as torchao's Float8,
    # holds its values in other tensors. An AsyncCollectiveTensor is waited for.
    if type(local).__name__ == "FlatParameter":
        return (
            "is a FlatParameter, in which FSDP1 joins shards of several parameters: use its sharded state dict, which "
            "has DTensors if FSDP was given a device_mesh"
        )
    if type(local).__name__ == "ShardedTensor":
        return (
            "is a ShardedTensor, as a sharded state dict of FSDP1 has without a device_mesh: give FSDP a device_mesh, "
            "and use its sharded state dict, which has DTensors then; or say with piece() what each of its "
            "local_shards() holds"
        )
    is_wrapper = type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_wrapper and not isinstance(local, AsyncCollectiveTensor):
        kind = type(local).__name__
        return f"is a {kind}, and a transfer moves plain tensors: give those that it holds, each with a name"
    if local.is_meta and not may_be_on_meta:  # as FSDP2's parameters are before to_empty()
        return "is on meta and has no memory: materialise it first, as to_empty() does, or name a target in stages="
    return None


def is_pieces(part: Any) -> bool:
    """True for a tuple of pieces, which is one tensor. An empty tuple is a part of the tree that has no leaves."""
    return isinstance(part, tuple) and bool(part) and all(isinstance(item, Piece) for item in part)


def settled(local: torch.Tensor) -> torch.Tensor:
    """Return a local tensor whose values are there: waits for a functional collective that still brings them."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def part_of(name: str, box: Box, local: torch.Tensor, stage: int = 0) -> HeldBox | None:
    """Describe where a box of a tensor lies in the memory of a local tensor; None if it has no element. A tensor on
    meta shares memory with views of its storage that come in the same stage."""
    local = settled(local)
    if not local.numel():
        return None
    size = local.element_size()
    address = local.data_ptr()
    if local.is_meta:  # beyond all addresses, and as far from other storages as these can be long
        address = ((stage << 64) + local.untyped_storage()._cdata << 64) + local.storage_offset() * size
    memory = Memory(address, tuple(local.shape), tuple([size * stride for stride in local.stride()]), size)
    return HeldBox(name, str(local.dtype), box, memory)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if several elements of a tensor share one place in memory.

    >>> overlaps_itself((3, 2), (1, 0)), overlaps_itself((3, 2), (1, 1)), overlaps_itself((3, 2), (2, 3))
    (True, True, False)
    """
    dims = sorted([(stride, length) for length, stride in zip(shape, strides) if length > 1])
    reach, is_plain = 0, True
    for stride, length in dims:
        is_plain = is_plain and stride > reach
        reach += stride * (length - 1)
    if is_plain or 0 in shape:
        return False
    if any(not stride for stride, _ in dims):
        return True
    # Rare: strides that interlock, as (2, 3) of a (3, 2). Each element's place is computed.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, length in dims:
        places = (places[:, None] + stride * torch.arange(length, device="cpu")).flatten()
    return len(places.unique()) < len(places)


def lack_of_memory(local: torch.Tensor, needed: int | None = None) -> str | None:
    """Say that a local tensor's storage is too small for it, in words; None if it isn't."""
    if needed is None:
        steps = [(length - 1) * stride for length, stride in zip(local.shape, local.stride())]
        needed = (local.storage_offset() + sum(steps) + 1) * local.dtype.itemsize if local.numel() else 0
    size = local.untyped_storage().nbytes()
    if size >= needed:
        return None
    # FSDP frees a gathered parameter by resizing its storage to 0. The tensor keeps its shape, without memory.
    freed = "" if size else " (FSDP frees parameters that it gathered: take them after reshard())"
    return f"needs {needed} bytes of storage, and has {size}{freed}"


def digests_of(name: str, given: Given, boxes: Collection[Box]) -> list[tuple[Box, str]]:
    """Return those of these boxes that this rank gives of a source, each with the digest of its values. Empty for a
    DTensor, whose replicas are the program's affair."""
    digests = []
    for part in given.pieces if isinstance(given, Pieces) else () if isinstance(given, DTensor) else (given,):
        if (box := part.shape_and_box[1]) in boxes:
            lack = lack_of_memory(local := settled(part._local_tensor))
            if lack is not None:
                raise ValueError(f"the source {name!r} {lack}")
            digests.append((box, digest(local)))
    return digests


DIGESTED = 1 << 16  # words of 8 bytes that are hashed at a time, so that intermediate results stay in the cache
_ODD_FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def digest(tensor: torch.Tensor) -> str:
    """Hash the bits of a tensor, on the device where it is. Equal bits have equal digests on every device.

    The hash is a sum over the words of 8 bytes, each mixed with its position. A sum may be taken in any order, as a GPU
    does.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
    (True, False)
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor with one element counts as contiguous whatever its strides, and view() would refuse some of them.
    flat = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
    return hashlib.blake2b(repr(word_sums(flat)).encode(), digest_size=16).hexdigest()


def word_sums(flat: torch.Tensor) -> list[int]:
    """Return the number of bytes, and for each DIGESTED words of these bytes the sum that `digest` hashes."""
    if flat.storage_offset() % 8:  # view(int64) needs an aligned beginning
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    positions = torch.arange(1, min(whole // 8, DIGESTED) + 8, device=flat.device) * _ODD_FACTORS[0]
    sums = []
    # The last 0 to 7 bytes are hashed as a word each.
    for words in (*flat[:whole].view(torch.int64).split(DIGESTED), flat[whole:].to(torch.int64)):
        # Products alone would give a tensor and its negative, which differ in the top bit of each word, one sum where
        # these bits cancel. So the upper half is folded into the lower one in between.
        mixed = (words ^ positions[: len(words)]).mul_(_ODD_FACTORS[1])
        mixed.bitwise_xor_(mixed >> 32).mul_(_ODD_FACTORS[2])
        sums.append(mixed.bitwise_xor_(mixed >> 29).sum())
    return [len(flat), *torch.stack(sums).tolist()]
