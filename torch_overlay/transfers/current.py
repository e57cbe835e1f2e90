"""The tensors of a transfer as they are when a run begins, held against what was planned; what ranks say of them; and
the thread of a run in the background.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ..distributed.tensor._planner.regions import NotPlanned
from .descriptions import Chunk, Meshes, Piece, Plain, by_sentence, layout_of, part_of, piece_text, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from .exchanges import Locals

    Job = Callable[[Callable[[], None]], None]  # calls what it is given when no source is read any more
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from ..distributed.tensor._planner.regions import Box
    from ._planner.memory import Part, Shared
    from .descriptions import Layout
    from .meeting import Place
    from .team import Team


class Running:
    """A run that goes on. The targets are undefined until `wait`.

    On a GPU it has a stream of its own, which begins after what the program has launched, and `wait` lets the
    program's stream go on after it.

    The constructor starts the run on a thread of its own, and returns at once.

    Args:
        run: does the run. Called once, on that thread, with a function that it calls when it reads no source any
            more. `wait` raises its error.
        ended: called on that thread when the run has ended or failed.
        device: of the tensors. On any but the CPU, the run waits for what the caller's stream has launched so far.
        is_sent: True if the run reads copies, so that `sent` is true from the beginning.
    """

    def __init__(self, run: Job, ended: Callable[[], None], device: torch.device, is_sent: bool = False) -> None:
        self._error: BaseException | None = None
        self._is_heard = False
        self._run: Job | None = run
        self._ended = ended
        self._is_sent = threading.Event()
        if is_sent:
            self._is_sent.set()
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._sent_event: Any = None  # of the stream
        self._end_event: Any = None
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(device))
        # No daemon: at the end of the program the interpreter waits for it, and tears nothing down under it.
        self._thread = threading.Thread(target=self._go, name="torch_overlay Transfer")
        self._thread.start()

    def _go(self) -> None:
        run, self._run = self._run, None  # which has the tensors
        try:
            if run is not None:
                with self._stream or contextlib.nullcontext():
                    run(self._say_sent)
        except BaseException as error:
            self._error = error
        finally:
            del run
            try:
                if self._stream is not None:
                    self._end_event = self._stream.record_event()
            finally:
                self._ended()

    def _say_sent(self) -> None:
        if self._stream is not None and not self._is_sent.is_set():
            self._sent_event = self._stream.record_event()
        self._is_sent.set()

    def sent(self) -> bool:
        """Whether the sources may be changed: they aren't read any more on this rank. That is before the end, when its
        last exchange is packed and what goes from tensor to tensor is sent, unless the rank has targets beside them,
        into which it copies last."""
        if self._is_sent.is_set():
            return self._sent_event is None or bool(self._sent_event.query())
        return self.is_completed()

    def is_completed(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._thread.is_alive() and (self._end_event is None or bool(self._end_event.query()))

    def wait(self) -> None:
        """Until the targets are whole; on a GPU, until they are for what the program launches next. Raises as
        `Transfer.run`, each time that it is called."""
        self._thread.join()
        self._is_heard = True
        self.precede()
        if self._error is not None:
            raise self._error

    def precede(self) -> None:
        """On a GPU, what the program launches next runs after this one, which its thread has launched."""
        if self._stream is not None and self._end_event is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(self._end_event)

    def unheard(self) -> list[str]:
        """The error of a run that has ended, in words, if nobody waited for it."""
        return [] if self._is_heard or self._error is None else [f"of the last run nobody waited for: {self._error}"]


def keep_for_this_stream(locals_: Iterable[torch.Tensor | None]) -> None:
    """The allocator gives the memory of these to nobody while this stream may read or write it, even if the program
    lets go of them."""
    for local in locals_:
        if local is not None and not local.is_cpu:
            local.record_stream(torch.accelerator.current_stream(local.device))


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None of one that doesn't count."""
    return None if tensor.is_inference() else tensor._version


def size_of(locals_: Locals, numbers: Collection[int]) -> int:
    """Bytes of the tensors that have these numbers; one that has several counts once."""
    each = {id(local): local.nbytes for number in numbers if (local := locals_[number]) is not None}
    return sum(each.values())


def copies(
    locals_: Locals, room: int, numbers: Collection[int], why: str
) -> tuple[list[torch.Tensor | None], list[str]]:
    """The same list, with copies of the tensors that have these numbers; and, if they don't fit into `room` bytes, that
    they don't, in words.

    Args:
        why: what takes the room, for these words.
    """
    each = {id(local): local for number in numbers if (local := locals_[number]) is not None}
    size = size_of(locals_, numbers)
    if size > room:
        return [*locals_], [f"{why} takes {size} bytes, and {room} of the budget are left: give a larger budget="]
    with torch.no_grad():
        copied = {key: local.detach().clone() for key, local in each.items()}
    return [copied.get(id(local), local) if n in numbers else local for n, local in enumerate(locals_)], []


class Current:
    """One tensor of one side, on a rank that has a part of it.

    Of its local tensor nothing is kept but what it is like, so that memory that it gives up is free at once.

    Attributes:
        name: of the whole tensor.
        lies: where its elements were when a run last looked; compared, and not read.
    """

    def __init__(
        self, side: str, name: str, tensor: DTensor | Plain, layout: Layout, place: Place | None = None
    ) -> None:
        self._side, self.name, self._tensor, self._layout, self._met = side, name, tensor, layout, place
        local = tensor._local_tensor
        self._spec, self._shape, self._dtype, self._device = tensor._spec, local.shape, local.dtype, local.device
        self._piece = tensor.place if isinstance(tensor, Piece) else None
        self.lies: object = None  # where its elements were at the last look: address, strides, offset
        self._storage = settled(local).untyped_storage()._cdata  # not the storage itself, which would keep its memory
        self._needed, self._overlaps = 0, False

    def unlike(self, other: Current) -> str | None:
        """Why another tensor can't take this one's place, in words; None if it can."""
        changed = self._changed(other._tensor, other.local)
        if changed is None and other._piece != self._piece:
            now, before = ("a whole" if each is None else piece_text(*each) for each in (other._piece, self._piece))
            changed = f"is {now} and was {before}"
        return None if changed is None else f"has {self.name!r}, which {changed} when the Transfer was made"

    @property
    def versions(self) -> tuple[int | None, ...]:
        """How often it was changed in place: by itself, and as the local tensor of a DTensor."""
        local = self._tensor._local_tensor
        whole = self._whole
        return version_of(local if whole is None else whole), version_of(local)

    @property
    def counting(self) -> list[torch.Tensor]:
        """The tensors whose version counters a write through this tensor has to raise: the local tensor, and the tensor
        that it is a part of. Tensors of inference mode have no counter and are left out."""
        every = (self._whole, self._tensor._local_tensor)
        return [each for each in every if each is not None and not each.is_inference()]

    @property
    def _whole(self) -> torch.Tensor | None:
        """The program's own tensor, of which the local one is a part; None if they are the same."""
        if isinstance(self._tensor, Chunk):
            return self._tensor.owner
        return self._tensor if isinstance(self._tensor, torch.Tensor) else None

    @property
    def changed(self) -> str:
        """That it was, in words."""
        return f"the {self._side} {self.name!r} was changed in place while it was sent"

    @property
    def box(self) -> Box | None:
        """What it is of the whole; None of a DTensor."""
        return None if self._tensor._spec is not None else cast("Plain", self._tensor).place[1]

    def part(self, local: torch.Tensor) -> Part | None:
        """Which box of the whole lies where, in the local tensor of this moment; None if it holds no element."""
        mesh = self._tensor.device_mesh
        box = self.box if mesh is None else self._layout.regions.box(mesh.get_coordinate())
        return part_of(self.name, cast("Box", box), local)

    @property
    def device(self) -> torch.device:
        """Where it was planned to be."""
        return self._device

    @property
    def mesh(self) -> DeviceMesh | None:
        """Its DTensor's; a plain tensor has none."""
        return self._tensor.device_mesh

    @property
    def local(self) -> torch.Tensor:
        """What the rank holds now; what is still coming is waited for."""
        return settled(self._tensor._local_tensor)

    def problem(self, local: torch.Tensor) -> str | None:
        """Why it can't be part of a run, in words; None if it can."""
        changed = self._changed(self._tensor, local)
        if changed is not None:
            return f"the {self._side} {self.name!r} {changed} when the Transfer was made"
        unusable = self._unusable(local)
        return None if unusable is None else f"the {self._side} {self.name!r} {unusable}"

    def _changed(self, tensor: DTensor | Plain, local: torch.Tensor) -> str | None:
        changed = tensor.now if isinstance(tensor, Chunk) else None
        if tensor._spec is not self._spec:
            changed = self._other_layout(tensor)
        if changed is None and local.shape != self._shape:
            changed = f"has shape {tuple(local.shape)} and had {tuple(self._shape)}"
        if changed is None and local.dtype is not self._dtype:
            changed = f"is {_short(local.dtype)} and was {_short(self._dtype)}"
        if changed is None and local.device != self._device:
            changed = f"is on {local.device} and was on {self._device}"
        return changed

    def _other_layout(self, tensor: DTensor | Plain) -> str | None:
        """Whether the DTensor became another one, as `Module.to` makes it, on another mesh or with other placements."""
        if tensor._spec is None or self._spec is None:
            return f"is a {'plain tensor' if tensor._spec is None else 'DTensor'} and was {self._layout}"
        try:
            now = layout_of(self.name, cast("DTensor", tensor), Meshes(self._met))
        except (NotPlanned, ValueError) as error:  # as of a mesh whose world isn't the place's any more
            return f"changed ({error}) and was {self._layout}"
        if now != self._layout:
            return f"is {now} and was {self._layout}"
        if tensor is self._tensor:
            self._spec = tensor._spec
        return None

    def _unusable(self, local: torch.Tensor) -> str | None:
        """Whether its elements lie where they can be read and written, each in its own place."""
        strides, offset = local.stride(), local.storage_offset()
        lies = local.data_ptr(), strides, offset
        if lies != self.lies:
            steps = [(length - 1) * stride for length, stride in zip(self._shape, strides)]
            self._needed = (offset + sum(steps) + 1) * self._dtype.itemsize if local.numel() else 0
            self._overlaps = bool(local.numel()) and any(
                length > 1 and not stride for length, stride in zip(self._shape, strides)
            )
            self.lies = lies
        storage = local.untyped_storage()
        there = storage.nbytes()
        if there < self._needed:
            freed = "" if there else " (FSDP frees parameters that it gathered: take them after reshard())"
            return f"needs {self._needed} bytes of storage, and has {there}{freed}"
        base = local._base if self._spec is None and storage._cdata == self._storage else None
        if base is not None and base.untyped_storage()._cdata != self._storage:
            # p[:4] keeps the memory that p had; after `p.data = other` it isn't a part of p any more.
            return (
                "is a view of a tensor whose .data is another one now, and would move what that left behind: slice it "
                "again, and bind() the views"
            )
        if self._side == "target":
            if local.is_conj() or local.is_neg():
                return "is a conjugate or a negative view, which has no memory of its own to write to"
            if self._overlaps:
                return "is expanded: several elements share one place in memory"
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_NO_VERSION = -(1 << 62)


def names_of(only: Any) -> tuple[tuple[str, ...] | None, list[str]]:
    """The names that a run is for, in order, and what is wrong with them."""
    if only is None:
        return None, []
    names: list[Any] = [*only] if isinstance(only, Iterable) and not isinstance(only, str) else [None]
    if not all(isinstance(name, str) for name in names):
        return None, [f"only= takes several names, and got {only!r}"]
    return tuple(sorted({*names})), []


def whole_number(version: Any) -> tuple[int | None, list[str]]:
    """A version, and what is wrong with it."""
    if version is None or (isinstance(version, int) and abs(version) < -_NO_VERSION):
        return version, []
    return None, [f"version= takes a whole number of less than 63 bits, and got {version!r}"]


def locals_of(tensors: Sequence[Current | None], numbers: Sequence[int]) -> tuple[list[torch.Tensor | None], list[str]]:
    """What this rank holds now, by the number of the tensor, and what is wrong with it; of the others nothing."""
    found: list[torch.Tensor | None] = [None] * len(tensors)
    problems = []
    for number in numbers:
        tensor = tensors[number]
        if tensor is not None:
            found[number] = local = tensor.local
            problems.append(tensor.problem(local))
    return found, [problem for problem in problems if problem is not None]


class _Seen(NamedTuple):
    """One tensor as a run found it: all by which the next run could tell that it changed."""

    tensor: DTensor | Plain
    local: torch.Tensor
    spec: object
    storage: torch.UntypedStorage
    address: int
    size: int  # of the storage: memory that was offloaded may come back smaller, at the same address
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class LastRun:
    """The tensors of a run that passed every check, by which the next run sees that none of them has changed since.

    It compares what `Current.problem` and the views of `exchanges` look at. It keeps the tensors and their storages, so
    it is for runs that keep views: a storage that isn't kept may be followed by another one at its address.

    Attributes:
        sources, targets: the local tensors, as `locals_of` gives them.
        shared: what is known of their memory.
    """

    def __init__(
        self,
        currents: Iterable[Current | None],
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        shared: Shared,
    ) -> None:
        self.sources, self.targets, self.shared = sources, targets, shared
        tensors = [current._tensor for current in currents if current is not None]
        locals_ = [tensor._local_tensor for tensor in tensors]
        # Equal values are one object here: what a run reads is out of the processor's cache, and costs more than work.
        known: dict[Any, Any] = {}
        self._seen = []
        for tensor, local in zip(tensors, locals_):
            storage = local.untyped_storage()
            lies = [known.setdefault((type(one), one), one) for one in (storage.nbytes(), local.shape, local.stride())]
            self._seen.append(
                _Seen(tensor, local, tensor._spec, storage, local.data_ptr(), lies[0], lies[1], lies[2], local.dtype)
            )
        # A view of p isn't a part of p any more after `p.data = other`, though nothing of the view changed.
        bases = [base for local in locals_ if (base := local._base) is not None]
        self._bases = [(base, base.untyped_storage()) for base in bases]
        self._complex = [local for local in locals_ if local.is_complex()]
        # What a collective still brings is waited for in each run; what stands conjugated is copied; a chunk list is
        # asked for anew.
        self._is_known = not any(type(each) is Chunk for each in tensors) and not any(
            type(t) is AsyncCollectiveTensor or t.is_conj() or t.is_neg() for t in locals_
        )
        self._written: tuple[frozenset[int], list[torch.Tensor]] | None = None

    def is_unchanged(self) -> bool:
        """Whether all tensors are what they were, where they were; false if that can't be known."""
        if not self._is_known:
            return False
        for tensor, local, spec, storage, address, size, shape, stride, dtype in self._seen:
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

    def written(self, numbers: frozenset[int], find: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """The tensors whose version counters show that the targets of these numbers were written; found once."""
        if self._written is None or self._written[0] != numbers:
            self._written = numbers, find()
        return self._written[1]


class Agreed(NamedTuple):
    """What came of the words of all ranks.

    Attributes:
        problems: what keeps which ranks from running.
        version: what those said who said one.
        is_background: whether some rank goes on meanwhile.
        lost: the ranks that don't have what was sent to them last.
    """

    problems: list[str]
    version: int | None = None
    is_background: bool = False
    lost: frozenset[int] = frozenset()


class Word(NamedTuple):
    """What a rank says when a run begins.

    Attributes:
        problems: what keeps it from running.
        only: the names of the tensors that are to be moved, in order; None for all.
        version: of what it gives, a whole number; None if it doesn't say.
        checks: whether replicas are to be compared.
        is_background: whether it goes on meanwhile, and says at the end whether its sources stayed as they were.
        lost: whether its targets may not be what was sent to it last, so that changes of that aren't enough.
    """

    problems: Sequence[str]
    only: tuple[str, ...] | None = None
    version: int | None = None
    checks: bool = False
    is_background: bool = False
    lost: bool = False

    def agree(self, team: Team) -> Agreed:
        """What ranks of the team say together, the same on all of them. Returns when all of them have come."""
        only = 0 if self.only is None else 1 + zlib.crc32("\0".join(self.only).encode())
        version = _NO_VERSION if self.version is None else self.version
        flags = self.checks, self.is_background, self.lost
        rows = team.gather([len(self.problems), only, version, *map(int, flags)])
        problems, onlys, versions, checks, background, _ = [{*column} for column in zip(*rows)]
        versions -= {_NO_VERSION}
        if problems == {0} and len(onlys) == len(checks) == 1 and len(versions) < 2:
            lost = frozenset(rank for rank, (*_, is_lost) in zip(team.ranks, rows) if is_lost)
            return Agreed([], next(iter(versions), None), 1 in background, lost)
        said = [*self.problems]
        if len(onlys) > 1:
            said.append("runs all of it" if self.only is None else f"runs only {', '.join(map(repr, self.only))}")
        if len(versions) > 1 and self.version is not None:
            said.append(f"says version {self.version}")
        if len(checks) > 1:
            said.append(f"runs with check={self.checks}")
        return Agreed(by_sentence(team.gather_data(said)))
