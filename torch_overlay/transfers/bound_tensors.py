"""The tensors that a transfer reads and writes on this rank, as they are when a run begins. Start at `BoundTensor`.

A program may offload, replace or move a tensor between two runs. Each run compares what it finds with what was planned,
before anything is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..distributed.tensor._planner.regions import NotPlanned
from ._planner.memory import Shared
from .descriptions import SIDES
from .pieces import (
    Chunk,
    Piece,
    Pieces,
    Plain,
    lack_of_memory,
    overlaps_itself,
    part_of,
    piece_text,
    settled,
    tensor_with_chunks,
)
from .sharding import Meshes, sharding_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from ..distributed.tensor._planner.boxes import Box
    from ..rendezvous.place import Place
    from ._planner.memory import HeldBox
    from .blocks import Locals
    from .pieces import Given
    from .sharding import Sharding
    from .stages import Stages
    from .tensor_moves import TensorMove


class BoundTensor:
    """A tensor of one side that this rank gave, and what it was like when the transfer was planned.

    It holds the DTensor, or the `Plain`, but not its local tensor: memory that the program gives up is free at once.

    Args:
        side: "source" or "target".
        name: of the whole tensor.
        sharding: of the whole tensor, as all ranks agreed on it; if it lies on several meshes, on this rank's mesh.
        place: where several worlds met, if they did.
        stage: the number of its group, from 1, if it comes in stages; else 0.

    Attributes:
        name: of the whole tensor.
        is_staged: whether it has memory only while it comes.
        location: the address, strides and offset of the local tensor when `problem` last looked; None before. Only
            compared.
    """

    def __init__(
        self,
        side: str,
        name: str,
        tensor: DTensor | Plain,
        sharding: Sharding,
        place: Place | None = None,
        stage: int = 0,
    ) -> None:
        self._side, self.name, self._tensor, self._sharding, self._place = side, name, tensor, sharding, place
        local = tensor._local_tensor
        self._stage, self.is_staged = stage, local.is_meta
        self._spec, self._shape, self._dtype, self._device = tensor._spec, local.shape, local.dtype, local.device
        self._shape_and_box = tensor.shape_and_box if isinstance(tensor, Piece) else None
        self.location: object = None
        # The id of the storage. Holding the storage itself would keep its memory.
        self._storage = settled(local).untyped_storage()._cdata
        # Of the local tensor that lies there: the bytes that its storage must have, and whether elements overlap.
        self._needed, self._overlaps = 0, False

    def why_unlike(self, other: BoundTensor) -> str | None:
        """Say why another tensor can't take this one's place in `bind`, in words; None if it can."""
        changed = self._how_changed(other._tensor, other.local)
        if changed is None and other._shape_and_box != self._shape_and_box:
            now, before = (
                "a whole" if piece is None else piece_text(*piece)
                for piece in (other._shape_and_box, self._shape_and_box)
            )
            changed = f"is {now} and was {before}"
        return None if changed is None else f"has {self.name!r}, which {changed} when the Transfer was made"

    @property
    def versions(self) -> tuple[int | None, ...]:
        """The version counters of the program's tensor and of the local tensor. One of them rises with each write in
        place: a DTensor and its local tensor have a counter each."""
        local = self._tensor._local_tensor
        whole = self._whole
        return version_of(local if whole is None else whole), version_of(local)

    def counts_as(self, other: BoundTensor) -> bool:
        """True if a write through this tensor raises the other one's version counter: they are one tensor, or views of
        one."""
        given = [tensor._tensor._local_tensor if tensor._whole is None else tensor._whole for tensor in (self, other)]
        one, another = (tensor if tensor._base is None else tensor._base for tensor in given)
        return one is another

    @property
    def counting(self) -> list[torch.Tensor]:
        """The tensors whose version counters a write through this tensor has to raise: the local tensor, and the tensor
        that it is a part of. Tensors of inference mode have no counter and are left out."""
        tensors = (self._whole, self._tensor._local_tensor)
        return [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]

    @property
    def _whole(self) -> torch.Tensor | None:
        """The tensor that the program gave, if the local tensor is another one; None if they are the same."""
        if isinstance(self._tensor, Chunk):
            return self._tensor.owner
        return self._tensor if isinstance(self._tensor, torch.Tensor) else None

    @property
    def changed_text(self) -> str:
        """The problem to report if `versions` rose during a run in the background."""
        return f"the {self._side} {self.name!r} was changed in place while it was sent"

    @property
    def memory(self) -> object:
        """Where the tensor lies, to compare with later: `p.data = other` changes that, and no version counter. While
        the value lives, no other storage equals it."""
        # The chunks of a tensor may be new views each time, or copies.
        local = tensor_with_chunks(self._tensor.owner) if isinstance(self._tensor, Chunk) else self.local
        return StorageWeakRef(local.untyped_storage()), local.data_ptr()

    @property
    def moved_text(self) -> str:
        """The problem to report if `memory` changed during a run in the background."""
        if self._side == "source":
            return f"the source {self.name!r} was given other memory, as by .data, while it was sent"
        return (
            f"the target {self.name!r} was given other memory, as by .data, before wait(), and the old one was written"
        )

    @property
    def box(self) -> Box | None:
        """The box of the whole tensor that a plain tensor or a piece holds; None for a DTensor."""
        return None if self._tensor._spec is not None else cast("Plain", self._tensor).shape_and_box[1]

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ranks of a DTensor's mesh that hold the box that this rank holds, with this one; empty for a plain tensor
        or a piece, of which this rank alone doesn't know who else has it."""
        mesh, (_, sizes, orders, _) = self._tensor.device_mesh, self._sharding.regions
        if mesh is None:
            return ()
        cutting = {axis for axes in orders for axis in axes}
        here = tuple([at if axis in cutting else slice(None) for axis, at in enumerate(mesh.get_coordinate() or ())])
        return tuple(torch.tensor(self._sharding.ranks, device="cpu").reshape(sizes)[here].flatten().tolist())

    def part(self, local: torch.Tensor) -> HeldBox | None:
        """Describe where this rank's box of the whole tensor lies in memory; None if the box has no element. The rank
        is in the tensor's mesh."""
        mesh = self._tensor.device_mesh
        box = self.box if mesh is None else self._sharding.regions.box(mesh.get_coordinate())
        return part_of(self.name, cast("Box", box), local, self._stage)

    @property
    def device(self) -> torch.device:
        """Where the local tensor was when the transfer was planned, and must be in each run."""
        return self._device

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of a DTensor; None for a plain tensor or a piece."""
        return self._tensor.device_mesh

    @property
    def local(self) -> torch.Tensor:
        """The local tensor as it is now. Waits for a functional collective that still brings its values."""
        return settled(self._tensor._local_tensor)

    def problem(self, local: torch.Tensor) -> str | None:
        """Say why this tensor can't be part of a run, in words; None if it can. Updates `location`, unless its
        sharding, shape, dtype or device isn't the planned one any more. Remembers an equal spec that took the place of
        the planned one."""
        changed = self._how_changed(self._tensor, local)
        if changed is not None:
            return f"the {self._side} {self.name!r} {changed} when the Transfer was made"
        why = self._why_unusable(local)
        return None if why is None else f"the {self._side} {self.name!r} {why}"

    def _how_changed(self, tensor: DTensor | Plain, local: torch.Tensor) -> str | None:
        """Say how a tensor differs from the planned one in chunk, placements, shape, dtype or device; None if it
        doesn't. The words go before "when the Transfer was made"."""
        changed = tensor.moved_text if isinstance(tensor, Chunk) else None
        if tensor._spec is not self._spec:
            changed = self._how_resharded(tensor)
        if changed is None and local.shape != self._shape:
            changed = f"has shape {tuple(local.shape)} and had {tuple(self._shape)}"
        if changed is None and local.dtype is not self._dtype:
            changed = f"is {_dtype_name(local.dtype)} and was {_dtype_name(self._dtype)}"
        if changed is None and local.device != self._device:
            changed = f"is on {local.device} and was on {self._device}"
        return changed

    def _how_resharded(self, tensor: DTensor | Plain) -> str | None:
        """Say how a tensor with another spec object is sharded, if it is sharded in another way; else None."""
        if tensor._spec is None or self._spec is None:
            return f"is a {'plain tensor' if tensor._spec is None else 'DTensor'} and was {self._sharding}"
        try:
            now = sharding_of(self.name, cast("DTensor", tensor), Meshes(self._place))
        except (NotPlanned, ValueError) as error:  # ValueError: its mesh is of a world that the place doesn't know
            return f"changed ({error}) and was {self._sharding}"
        if now != self._sharding:
            return f"is {now} and was {self._sharding}"
        if tensor is self._tensor:
            self._spec = tensor._spec
        return None

    def _why_unusable(self, local: torch.Tensor) -> str | None:
        """Say why this local tensor can't be used; None if it can. Its memory was freed, it is a view of memory that
        its base no longer has, or, for a target, its elements can't be written in place."""
        strides, offset = local.stride(), local.storage_offset()
        location = local.data_ptr(), strides, offset
        if location != self.location:
            steps = [(length - 1) * stride for length, stride in zip(self._shape, strides)]
            self._needed = (offset + sum(steps) + 1) * self._dtype.itemsize if local.numel() else 0
            self._overlaps = overlaps_itself(self._shape, strides)
            self.location = location
        storage = local.untyped_storage()
        lack = lack_of_memory(local, self._needed)
        if lack is not None:
            return lack
        base = local._base if self._spec is None and storage._cdata == self._storage else None
        if base is not None and base.untyped_storage()._cdata != self._storage:
            # p[:4] keeps the memory that p had. After `p.data = other` it isn't a part of p any more.
            return (
                "is a view of a tensor whose .data is another one now, and would move what that left behind: slice it "
                "again, and bind() the views"
            )
        if self._side == "target":
            if local.is_conj() or local.is_neg():
                return "is a conjugate or a negative view, which has no memory of its own to write to"
            if self._overlaps:
                return "overlaps itself, as an expanded tensor does: several elements share one place in memory"
        return None


def _dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter, which rises with each write in place; None for a tensor of inference mode,
    which has none."""
    return None if tensor.is_inference() else tensor._version


def size_of(locals_: Locals, indices: Collection[int]) -> int:
    """Add up the bytes of the local tensors with these indices. A tensor that has several of them counts once."""
    size_by_id = {id(local): local.nbytes for index in indices if (local := locals_[index]) is not None}
    return sum(size_by_id.values())


def copies(
    locals_: Locals, room: int, indices: Collection[int], why: str, are_made: bool = False
) -> tuple[list[torch.Tensor | None], list[str]]:
    """Replace the local tensors with these indices by copies, if these fit into `room` bytes. With `are_made` they are
    copies already."""
    by_id = {id(local): local for index in indices if (local := locals_[index]) is not None}
    size = size_of(locals_, indices)
    if size > room:
        return [*locals_], [f"{why} takes {size} bytes, and {room} of the budget are left: give a larger budget="]
    if are_made:
        return [*locals_], []
    with torch.no_grad():
        copied = {key: local.detach().clone() for key, local in by_id.items()}
    return [copied.get(id(local), local) if n in indices else local for n, local in enumerate(locals_)], []


def locals_of(
    tensors: Sequence[BoundTensor | None], indices: Sequence[int]
) -> tuple[list[torch.Tensor | None], list[str]]:
    """Read the local tensors with these indices, and check each of them (`BoundTensor.problem`). Waits for functional
    collectives that still bring values."""
    locals_: list[torch.Tensor | None] = [None] * len(tensors)
    problems = []
    for index in indices:
        tensor = tensors[index]
        if tensor is not None:
            locals_[index] = local = tensor.local
            problems.append(tensor.problem(local))
    return locals_, [problem for problem in problems if problem is not None]


def bind_side(
    side: str,
    given: Mapping[str, Given],
    moves: Sequence[TensorMove],
    place: Place | None,
    stages: Stages | None = None,
) -> list[BoundTensor | None]:
    """Find this rank's tensor for each move, on one side. Nothing is compared."""
    bound: list[BoundTensor | None] = []
    for tensor, numbers, *_ in moves:
        own, number = given.get(tensor.name), numbers[SIDES.index(side)]
        if isinstance(own, Pieces):
            own = own.pieces[number] if number < len(own.pieces) else None
        elif number:  # pieces of other ranks
            own = None
        mesh = None if own is None else own.device_mesh
        # A rank can hold a DTensor of a mesh that it isn't in. Its local tensor is empty.
        if own is None or (mesh is not None and mesh.get_coordinate() is None):
            bound.append(None)
        else:
            sharding = getattr(tensor, side)
            # This rank's tensor is on one of several meshes, or on one, where other ranks have it in another way.
            if sharding.meshes > 1 or (sharding.pieces and mesh is not None):
                sharding = sharding_of(tensor.name, cast("DTensor", own), Meshes(place))
            stage = 0 if stages is None or side == SIDES[0] else stages.number(tensor.name)
            bound.append(BoundTensor(side, tensor.name, own, sharding, place, stage))
    return bound


def rebind_side(
    side: str,
    given: Mapping[str, Given],
    moves: Sequence[TensorMove],
    place: Place | None,
    before: Sequence[BoundTensor | None],
    stages: Stages | None = None,
) -> list[BoundTensor | None]:
    """Find other tensors for the moves, as `bind_side` does, to take the place of those bound `before`."""
    bound = bind_side(side, given, moves, place, stages)
    for (tensor, *_), old, new in zip(moves, before, bound):
        problem = None
        if old is not None and new is None:
            problem = f"lacks {tensor.name!r}, which this Transfer moves"
        elif old is None and new is not None:
            problem = f"has {tensor.name!r}, of which this rank had no part when this Transfer was made"
        elif old is not None and new is not None:
            problem = old.why_unlike(new)
        if problem is not None:
            raise ValueError(f"The {side} to bind {problem}. Nothing was bound.")
    return bound


def shared_memory(
    indices: Sequence[int],
    sources: Locals,
    targets: Locals,
    bound_sources: Sequence[BoundTensor | None],
    bound_targets: Sequence[BoundTensor | None],
) -> Shared:
    """Find out which of this rank's tensors share memory."""
    sides: list[dict[int, HeldBox]] = []
    for bound, locals_ in ((bound_sources, sources), (bound_targets, targets)):
        parts: dict[int, HeldBox] = {}
        for index in indices:
            tensor, local = bound[index], locals_[index]
            if tensor is not None and local is not None and (part := tensor.part(local)) is not None:
                parts[index] = part
        sides.append(parts)
    return Shared.of(*sides)


class _LocalState(NamedTuple):
    """A local tensor as a run found it, with everything by which the next run can tell that it changed.

    Attributes:
        tensor: the DTensor, or the `Plain`.
        spec: its DTensorSpec.
        size: bytes of the storage. Memory that was offloaded may come back smaller, at the same address.
    """

    tensor: DTensor | Plain
    local: torch.Tensor
    spec: object
    storage: torch.UntypedStorage
    address: int
    size: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class LastRun:
    """The tensors of a run that passed every check. With `keep`, the next run uses them again if none has changed.

    It compares all that `BoundTensor.problem` and the cached views of `exchanges` look at. It holds the tensors and
    their storages, which only `keep` allows: without that, another storage could come to lie at the same address.

    Args:
        tensors: the bound tensors of both sides; None where this rank has no part.
        sources, targets: their local tensors, as `locals_of` gives them.
        shared: what is known of their memory.
    """

    def __init__(
        self,
        tensors: Iterable[BoundTensor | None],
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        shared: Shared,
    ) -> None:
        self.sources, self.targets, self.shared = sources, targets, shared
        given = [tensor._tensor for tensor in tensors if tensor is not None]
        locals_ = [tensor._local_tensor for tensor in given]
        # Equal values become one object. With many small tensors, a run spends its time on fetching such objects into
        # the processor's cache, not on comparing them.
        known: dict[Any, Any] = {}
        self._states = []
        for tensor, local in zip(given, locals_):
            storage = local.untyped_storage()
            size, shape, stride = (
                known.setdefault((type(value), value), value)
                for value in (storage.nbytes(), local.shape, local.stride())
            )
            state = _LocalState(
                tensor, local, tensor._spec, storage, local.data_ptr(), size, shape, stride, local.dtype
            )
            self._states.append(state)
        # A view of p isn't a part of p any more after `p.data = other`, though nothing of the view changed.
        bases = [base for local in locals_ if (base := local._base) is not None]
        self._bases = [(base, base.untyped_storage()) for base in bases]
        self._complex = [local for local in locals_ if local.is_complex()]
        # Three kinds must be read again in each run: an AsyncCollectiveTensor is waited for, a conjugate or negative
        # view is copied, and a chunk list may say something else now.
        self._is_comparable = not any(isinstance(tensor, Chunk) for tensor in given) and not any(
            type(local) is AsyncCollectiveTensor or local.is_conj() or local.is_neg() for local in locals_
        )
        self._written: tuple[frozenset[int], list[torch.Tensor]] | None = None

    def is_unchanged(self) -> bool:
        """True if all tensors are what they were, and where they were. False also if that can't be known."""
        if not self._is_comparable:
            return False
        for tensor, local, spec, storage, address, size, shape, stride, dtype in self._states:
            if (
                tensor._local_tensor is not local
                or tensor._spec is not spec
                or local.data_ptr() != address
                or local.untyped_storage() is not storage
                or storage.nbytes() != size
                or local.dtype is not dtype
                or local.shape != shape
                or local.stride() != stride
                or local.is_neg()
            ):
                return False
        # After `t.data = t.conj()` all of the above is equal.
        is_conj = any(local.is_conj() for local in self._complex)
        return not is_conj and all(base.untyped_storage() is storage for base, storage in self._bases)

    def written(self, indices: frozenset[int], find: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the tensors whose version counters rise when the targets with these indices are written."""
        if self._written is None or self._written[0] != indices:
            self._written = indices, find()
        return self._written[1]
