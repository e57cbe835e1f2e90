"""Stages: targets that have memory only from when they begin to come until a function has made of them what it needs.

`Transfer(stages=)` gets groups of names, each with a function. A group's targets are given without memory, on meta. In
a run they come one group after the other, and while the function works, the next group is under way. Start at `Stages`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ..distributed._torch import span
from .pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..rendezvous.watch import Watch

    Finish = Callable[[dict[str, Any]], object]


class Stage:
    """One group.

    Attributes:
        leaves: by name, what the target has: on meta, or with memory of its own.
    """

    def __init__(self, names: Sequence[str], finish: Finish) -> None:
        self.names, self._finish = tuple(names), finish
        self.leaves: dict[str, Any] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}  # by the storage on meta

    def real(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor with memory in place of one on meta. Views of one storage get views of one storage."""
        return _with_memory(tensor, self._memory, device)

    def finish(self, device: torch.device, is_copied: bool) -> None:
        """Call the user's function. It may write into what it gets: with `is_copied`, into copies."""
        memory = self._memory
        if is_copied and self._memory:
            memory = {each: torch.UntypedStorage(one.nbytes(), device=device) for each, one in self._memory.items()}
            flat = [[_bytes(storage) for storage in some.values()] for some in (memory, self._memory)]
            torch._foreach_copy_(*flat)
        self._finish({name: _given(self.leaves[name], memory, device, is_copied) for name in self.names})

    def free(self) -> None:
        """Let go of the memory."""
        self._memory = {}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload,no-any-return]


def _given(leaf: Any, memory: dict[int, torch.UntypedStorage], device: torch.device, is_copied: bool) -> Any:
    def given(tensor: torch.Tensor) -> torch.Tensor:
        if is_copied and not tensor.is_meta:  # what the function wrote there would be wrong after the next changes
            return tensor.detach().clone()
        return _with_memory(tensor, memory, device)

    if isinstance(leaf, tuple):
        return tuple([_given(piece, memory, device, is_copied) for piece in leaf])
    if isinstance(leaf, Piece):
        return given(leaf._local_tensor)
    if isinstance(leaf, DTensor):
        local, lies = given(leaf._local_tensor), (leaf.shape, leaf.stride())
        placed = leaf.device_mesh, leaf.placements
        return DTensor.from_local(local, *placed, run_check=False, shape=lies[0], stride=lies[1])
    return given(leaf)


def _with_memory(tensor: torch.Tensor, memory: dict[int, torch.UntypedStorage], device: torch.device) -> torch.Tensor:
    """Return the tensor in memory that is there, by the storage on meta, or is allocated now."""
    if not tensor.is_meta:
        return tensor
    on_meta = tensor.untyped_storage()
    if on_meta._cdata not in memory:
        memory[on_meta._cdata] = torch.UntypedStorage(on_meta.nbytes(), device=device)
    return as_on_meta(tensor.detach(), memory[on_meta._cdata])


def as_on_meta(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor of a storage that lies there as another one does on meta, with its class and attributes."""
    real = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    real.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    if tensor.__dict__ or type(tensor) is not torch.Tensor:
        real.__class__, real.__dict__ = type(tensor), {**tensor.__dict__}
    return real


class Stages:
    """All groups of one rank, as the user gave them.

    Attributes:
        by_name: the group of each name.
        device: where they get memory; set by `place`.
    """

    def __init__(self, given: Any) -> None:
        self.every: list[Stage] = []
        self.by_name: dict[str, Stage] = {}
        self.device = torch.device("cpu")
        for entry in given:
            names, finish = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else (None, None)
            listed: list[Any] = [None] if isinstance(names, str) or not isinstance(names, Iterable) else [*names]
            if not callable(finish) or not listed or not all(isinstance(name, str) for name in listed):
                raise TypeError(f"stages= takes pairs of several names and a function of a dict; got {entry!r}.")
            stage = Stage(listed, finish)
            self.every.append(stage)
            for name in listed:
                if name in self.by_name:
                    raise ValueError(f"stages= takes each name once, and has {name!r} twice.")
                self.by_name[name] = stage

    @property
    def names(self) -> list[list[str]]:
        """The names of each group."""
        return [[*stage.names] for stage in self.every]

    def number(self, name: str) -> int:
        """The number of a name's group, from 1; 0 if it is in none."""
        return 1 + self.every.index(self.by_name[name]) if name in self.by_name else 0

    def choose_device(self, given: Iterable[Any]) -> None:
        """Decide on the device: that of the first tensor here that has memory; if none has, torch's default device."""
        devices = [local.device for leaf in given for local in _locals_of(leaf) if not local.is_meta]
        self.device = devices[0] if devices else torch.get_default_device()

    def free(self) -> None:
        """Let go of the memory of all groups."""
        for stage in self.every:
            stage.free()

    def see(self, leaves: Mapping[str, Any]) -> None:
        """Take note of the target's leaves, by path."""
        missing = [name for name in self.by_name if leaves.get(name) is None]
        if missing:
            raise ValueError(f"stages= has {', '.join(map(repr, missing[:5]))}, and the target on this rank doesn't")
        self.free()
        for name, stage in self.by_name.items():
            stage.leaves[name] = leaves[name]


def _locals_of(leaf: Any) -> list[torch.Tensor]:
    """The tensors of a leaf on this rank; none of one that is no tensor, which is an error later."""
    parts = leaf if isinstance(leaf, tuple) else getattr(leaf, "pieces", (leaf,))
    locals_ = [getattr(part, "_local_tensor", part) for part in parts]
    return [local for local in locals_ if isinstance(local, torch.Tensor)]


class Turns:
    """When the groups of a rank begin and end in a run of one plan.

    Args:
        begins: for each part of a run the groups of which it moves the first name, each with the places of its targets
            in the plan.
        ends: for each part the groups of which it moves the last name.
        device: where they get memory.
        keeps: whether they keep it, since the next run brings what changed alone.

    Attributes:
        error: what a function raised in the last run; None if none did.
        problem: the same, in words; "" if none did.
        seconds: what the functions took in the last run.
    """

    def __init__(
        self,
        begins: list[list[tuple[Stage, list[int]]]],
        ends: list[list[Stage]],
        device: torch.device,
        keeps: bool,
    ) -> None:
        self._begins, self._ends, self._device, self._keeps = begins, ends, device, keeps
        self._places = {stage: places for of_part in begins for stage, places in of_part}
        self._came: list[Stage] = []
        self._open = set[Stage]()
        self._targets: list[torch.Tensor | None] = []
        self.error: Exception | None = None
        self.problem, self.seconds = "", 0.0

    def start(self, targets: list[torch.Tensor | None]) -> None:
        """Begin a run into these targets, by place in the plan. Of those on meta the others take the places in turn."""
        self._came, self._targets, self.error, self.problem, self.seconds = [], targets, None, "", 0.0

    def begin(self, part: int) -> bool:
        """Give memory to the groups that begin in this part. Returns whether any group has memory now that it will
        lose."""
        with torch.inference_mode(False):  # for the user's function, which may write into them
            for stage, places in self._begins[part]:
                for place in places:
                    if (target := self._targets[place]) is not None:
                        self._targets[place] = stage.real(target, self._device)
        self._open |= {stage for stage, _ in self._begins[part]}
        return bool(self._open) and not self._keeps

    def end(self, part: int) -> None:
        """Note which groups have come with this part. `finish` is called when the next part is under way."""
        self._came += self._ends[part]

    def finish(self, watch: Watch | None = None) -> None:
        """Call the functions of the groups that have come, and let go of their memory. Raises nothing; after an error
        no further function is called in this run, so that what they haven't touched stays."""
        came, self._came = self._came, []
        for stage in came:
            try:
                begun = time.perf_counter()
                if self.error is None:
                    if watch is not None:  # others that wait hear what for
                        watch.does(f"the function for the stage of {stage.names[0]!r}")
                    with span("a stage's function"), torch.inference_mode(False), torch.no_grad():
                        stage.finish(self._device, is_copied=self._keeps)
                self.seconds += time.perf_counter() - begun
            except Exception as error:
                self.error = error
                said = f"{type(error).__name__}: {error}".removesuffix(".")
                self.problem = f"its function for the stage of {stage.names[0]!r} raised {said}"
            finally:
                self._free(stage)

    def free(self) -> None:
        """Let go of the memory of all groups."""
        for stage in self._places:
            self._free(stage)
        self._came, self._targets = [], []

    def _free(self, stage: Stage) -> None:
        for place in self._places[stage]:
            self._targets[place] = None
        self._open.discard(stage)
        if not self._keeps:
            stage.free()


def turns_of(stages: Stages | None, parts: Sequence[Sequence[tuple[int, str]]], keeps: bool) -> Turns:
    """Return when each group begins and ends in a run.

    Args:
        parts: of the run; for each move the place of its target in the plan, and the tensor's name.
        keeps: as of `Turns`.
    """
    begins: list[list[tuple[Stage, list[int]]]] = [[] for _ in parts]
    ends: list[list[Stage]] = [[] for _ in parts]
    places: dict[Stage, set[int]] = {}
    spans: dict[Stage, tuple[int, int]] = {}
    by_name = {} if stages is None else stages.by_name
    for number, part in enumerate(parts):
        for place, name in part:
            if (stage := by_name.get(name)) is not None:
                places.setdefault(stage, set()).add(place)
                spans[stage] = spans.get(stage, (number, number))[0], number
    last = 0
    for stage in () if stages is None else stages.every:
        if stage in spans:
            first, last = spans[stage][0], max(last, spans[stage][1])  # the functions are called in the order given
            begins[first].append((stage, sorted(places[stage])))
            ends[last].append(stage)
    return Turns(begins, ends, torch.device("cpu") if stages is None else stages.device, keeps)


def torn_groups(groups: Iterable[Sequence[str]], names: Collection[str]) -> list[str]:
    """Say of which groups these are some names and not all, in words."""
    texts = []
    for group in groups:
        lacking = [name for name in group if name not in names]
        if 0 < len(lacking) < len(group):
            some = next(name for name in group if name in names)
            texts.append(f"gets {some!r} without {lacking[0]!r}, and both are in one group of stages=")
    return texts


def levels_of(groups: Iterable[Sequence[Sequence[str]]]) -> dict[str, int]:
    """Return for each name in which turn it is moved, from 1, by the groups of all ranks. A name that several ranks
    have in different turns comes in the last of these.

    >>> levels_of([[["a"], ["b", "c"]], [["c"]]])
    {'a': 1, 'b': 2, 'c': 2}
    """
    levels: dict[str, int] = {}
    for of_rank in groups:
        for turn, names in enumerate(of_rank, 1):
            levels.update({name: max(turn, levels.get(name, 0)) for name in names})
    return levels
