"""`Description`: what one rank says of its tensors when a transfer is made, as a value and as JSON.

A rank knows the tensors that it has a part in. With pipeline stages or with two disjoint meshes no rank knows them all,
so ranks tell one another. Start at `describe`; `comparison.py` compares the descriptions of all ranks.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..distributed.tensor._planner.boxes import Box
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ._planner.memory import Shared
from .options import Options
from .pieces import Pieces, is_pieces, own_tensors, part_of
from .sharding import Meshes, Sharding, misfit, shardings
from .tensor_files import Checkpoint
from .trees import leaves, names_for, paths_of, with_paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..rendezvous.place import Place
    from ._planner.memory import HeldBox
    from .pieces import Given
    from .stages import Stages
    from .tensor_files import Files
    from .trees import Names

    Data = dict[str, Any]  # of text, numbers, lists and dicts, as JSON has them

SIDES = "source", "target"
AS_THEY_ARE = "options", "gives_nothing", "checkpoint", "stages"  # fields of a Description that JSON takes


class Description(NamedTuple):
    """What a rank says of its tensors and options.

    Attributes:
        source, target: the shardings of the tensors that it gives, by name.
        problem: why it can't take part, in words; None if it can.
        tied: the names of its targets that are one block of memory.
        options: as it gave them; None of one that refuses at once.
        gives_nothing: whether it gave None in place of both trees.
        checkpoint: what `Files.as_data` returned for its source, if that is a checkpoint.
        stages: the names of its targets that it gets in groups, one after the other.
    """

    source: dict[str, Sharding]
    target: dict[str, Sharding]
    problem: str | None = None
    tied: Sequence[tuple[str, ...]] = ()
    options: Options | None = None
    gives_nothing: bool = False
    checkpoint: Data | None = None
    stages: Sequence[Sequence[str]] = ()


class Described(NamedTuple):
    """What `describe` returns.

    Attributes:
        sides: the tensors that this rank gives, by name: the source's and the target's.
        error: the error from which `description.problem` was made, if reading the tensors raised one.
        files: the checkpoint's files, if the source is a checkpoint.
        paths: by name, the paths of sources that `names=` calls otherwise.
    """

    description: Description
    sides: tuple[dict[str, Given], dict[str, Given]]
    error: Exception | None = None
    files: Files | None = None
    paths: Mapping[str, str] = MappingProxyType({})


class Tensor(NamedTuple):
    """One tensor of a transfer, as all ranks agree on it."""

    name: str
    source: Sharding
    target: Sharding

    @property
    def sides(self) -> tuple[Sharding, Sharding]:
        """Its source and its target."""
        return self.source, self.target

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which it travels: the narrower one of both sides; of two equally wide ones, the target's.

        From float32 to bfloat16 the sender casts, and half of the bytes travel. The other way round the receiver casts.
        """
        dtypes = getattr(torch, self.source.dtype), getattr(torch, self.target.dtype)
        return dtypes[0] if dtypes[0].itemsize < dtypes[1].itemsize else dtypes[1]

    @property
    def is_cast(self) -> bool:
        """True if source and target have different dtypes."""
        return self.source.dtype != self.target.dtype


class Problem(NamedTuple):
    """What is wrong with a tensor. Problems sort in the order in which errors name them.

    Attributes:
        stage: 0: one side by itself; 1: both sides together; 2: pieces that don't cover their tensor. An error names
            the problems of the first stage that has some, since these may have caused the others.
        side: 0 for the source, 1 for the target; 2 for replicas that differ.
        text: in words, without a full stop.
    """

    stage: int
    side: int
    name: str
    text: str


def describe(
    source: Any, target: Any, names: Names, place: Place | None = None, stages: Stages | None = None
) -> Described:
    """Read both trees of this rank, and describe their tensors. With a checkpoint as the source, read the headers of
    its files.

    Raises nothing: an error becomes the description's problem, so that all ranks hear of it. If this rank raised, the
    others would wait for it in the meeting until the timeout.
    """
    try:
        files = checkpoint = None
        if isinstance(source, Checkpoint):
            files, source = source.read(), None
            checkpoint = files.as_data(lambda path: names_for(path, names))
        sources = own_tensors(source, SIDES[0], names)
        staged: Mapping[str, object] = {}
        if stages is not None:
            stages.see(of_target := leaves(target, is_pieces))
            stages.choose_device((*of_target.values(), *sources.values()))
            staged = stages.by_name
        sides = sources, own_tensors(target, SIDES[1], on_meta=staged)
        paths = paths_of(source, names, is_pieces)
        meshes = Meshes(place)
        by_side = [shardings(side, meshes) for side in sides]
        problems = [
            misfit(name, tensor, of_side[name].regions, meshes)
            for side, of_side in zip(sides, by_side)
            for name, tensor in side.items()
            if isinstance(tensor, DTensor)
        ]
        problems += [
            f"the source {name!r} has a pending reduction ({sharding.regions}): redistribute it on its mesh first"
            for name, sharding in by_side[0].items()
            if sharding.regions.pending
        ]
        problem = "; ".join(dict.fromkeys(filter(None, problems)))
        if problem:
            return Described(Description(by_side[0], by_side[1], with_paths(problem, paths)), sides)
        if stages is not None:
            by_side[1] |= {name: by_side[1][name]._replace(device=stages.device.type) for name in staged}
        targets = [
            part
            for name, given in sides[1].items()
            for part in _parts(name, given, by_side[1][name], meshes, 0 if stages is None else stages.number(name))
        ]
        # Of targets alone: sources that share memory are only read.
        shared = Shared.of({}, dict(enumerate(targets)))
        problem = "; ".join(shared_targets(shared))
        description = Description(by_side[0], by_side[1], problem or None, shared.tied, checkpoint=checkpoint)
        description = description._replace(stages=[] if stages is None else stages.names)
        return Described(description, sides, files=files, paths=paths)
    except (TypeError, ValueError, RuntimeError, NotPlanned) as error:
        # RuntimeError is torch's own, for instance of a tensor without storage.
        return Described(Description({}, {}, str(error)), ({}, {}), error)
    except Exception as error:
        # A function given as names= may raise anything. Of a KeyError, say, the text alone would be a bare key.
        return Described(Description({}, {}, f"{type(error).__name__}: {error}"), ({}, {}), error)


def _parts(name: str, given: Given, sharding: Sharding, meshes: Meshes, stage: int) -> list[HeldBox]:
    """Return which boxes of a tensor lie where in this rank's memory; without those that have no element."""
    if isinstance(given, DTensor):
        coordinate = meshes.view(given.device_mesh).coordinate
        box = None if coordinate is None else sharding.regions.box(coordinate)
        parts = [] if box is None else [part_of(name, box, given._local_tensor, stage)]
    else:
        pieces = given.pieces if isinstance(given, Pieces) else (given,)
        parts = [part_of(name, piece.shape_and_box[1], piece._local_tensor, stage) for piece in pieces]
    return [part for part in parts if part is not None]


def shared_targets(shared: Shared) -> list[str]:
    """Say which targets share memory so that one would overwrite another, in words, for each pair. Empty if none do."""
    return [
        f"the targets {first!r} and {second!r} share memory, and aren't one block: give each memory of its own, or one "
        "of them"
        if first != second
        else f"pieces of the target {first!r} share memory, and are different parts of it"
        for first, second in shared.clashes
    ]


def as_data(description: Description) -> Data:
    """Turn a description into values that JSON takes. `from_data` turns them back.

    Each mesh stands once, and shardings refer to it by its position: a mesh of 8,192 ranks is long. Tensors with one
    sharding, as 128 experts have that differ in their names alone, share one row.
    """
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    sides = []
    for side in (description.source, description.target):
        names: dict[Sharding, list[str]] = {}
        for name, sharding in side.items():
            names.setdefault(sharding, []).append(name)
        rows: list[Any] = []
        for (dtype, regions, ranks, device, pieces, _), of_sharding in names.items():
            mesh = meshes.setdefault((ranks, regions.sizes), len(meshes))
            rows.append([of_sharding, dtype, device, mesh, regions.shape, regions.orders, regions.partial, pieces])
        sides.append(rows)
    data: Data = {"meshes": [*meshes], "problem": description.problem, "tied": description.tied}
    data |= {name: getattr(description, name) for name in AS_THEY_ARE}
    return {**data, **dict(zip(SIDES, sides))}


def from_data(data: Data) -> Description:
    """Turn what `as_data` returned, once it has passed through JSON, back into a description."""
    meshes = [(tuple(ranks), tuple(sizes)) for ranks, sizes in data["meshes"]]
    sides: list[dict[str, Sharding]] = []
    for side in SIDES:
        sides.append({})
        for names, *row in data[side]:
            sides[-1].update(dict.fromkeys(names, _sharding(row, meshes)))
    tied = [tuple(names) for names in data["tied"]]
    options = None if data["options"] is None else Options(*data["options"])
    others = {name: data[name] for name in AS_THEY_ARE} | {"options": options}
    return Description(sides[0], sides[1], data["problem"], tied, **others)


def boxed(digests: Data) -> dict[str, list[tuple[Box, str]]]:
    """Turn digests that have passed through JSON, each beside its box, back: for each name, boxes and digests."""
    return {name: [(_box(box), value) for box, value in boxes] for name, boxes in digests.items()}


def all_from_data(data_by_rank: Mapping[int, Data]) -> dict[int, Description]:
    """Turn the data of all ranks into descriptions. Ranks whose data is one object get one description, so that what
    all ranks of a mesh say alike is read and compared once."""
    descriptions: dict[int, Description] = {}
    for data in data_by_rank.values():
        if id(data) not in descriptions:
            descriptions[id(data)] = from_data(data)
    return {rank: descriptions[id(data)] for rank, data in data_by_rank.items()}


def _sharding(row: list[Any], meshes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Sharding:
    """Read a row of `as_data`, without its names, as a sharding."""
    dtype, device, mesh, shape, orders, partial, pieces = row
    ranks, sizes = meshes[mesh]
    regions = Regions(tuple(shape), sizes, tuple(map(tuple, orders)), tuple(partial))
    return Sharding(dtype, regions, ranks, device, tuple([tuple(map(_box, boxes)) for boxes in pieces]))


def _box(data: list[list[int]]) -> Box:
    """Read the two lists into which JSON turns a box."""
    return Box(tuple(data[0]), tuple(data[1]))
