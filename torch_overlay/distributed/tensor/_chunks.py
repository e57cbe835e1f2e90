"""The boxes of a DTensor that a rank holds where its shard is strided: each is a chunk
of a checkpoint.

Of 8 rows over two ranks, ``_StridedShard(0, split_factor=2)`` gives rank 0 the rows 0
and 1, and 4 and 5. Its local tensor is these two boxes, one after the other. Start at
`strided_runs`. All other functions return None where it does: the rank holds one box,
or none, as every shard that isn't strided is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from .._torch import fsdp_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
    )
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor


class Run(NamedTuple):
    """Consecutive indices of a dim: the first in the whole tensor and the first in the
    local one, and how many."""

    offset: int
    local_offset: int
    length: int


class Cut(NamedTuple):
    """What one mesh dim does to a tensor dim. A shard that isn't strided has the split
    factor 1."""

    dim: int
    split_factor: int
    num_chunks: int
    coordinate: int


AMBIGUOUS = (
    "don't tell which rows a rank holds: FSDP makes such placements when it cuts what "
    "a strided shard left, and they say that it cut first. Let FSDP shard another dim "
    "(shard_placement_fn)."
)
HOOKS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def strided_runs(tensor: DTensor) -> tuple[tuple[Run, ...], ...] | None:
    """The runs that this rank holds on each dim, in the order of the local tensor. None
    unless they make several boxes, and the placements say so."""
    placements, mesh = tensor.placements, tensor.device_mesh
    if _StridedShard not in map(type, placements):
        return None
    coordinate, local = mesh.get_coordinate(), tensor._local_tensor
    # Any other class may cut in another way. A local tensor with hooks of its own says
    # itself what it holds.
    known = {*map(type, placements)} <= {Replicate, Shard, _StridedShard}
    if coordinate is None or not known or any(hasattr(local, hook) for hook in HOOKS):
        return None
    cuts = tuple(
        Cut(
            placement.dim, getattr(placement, "split_factor", 1), mesh.size(axis), index
        )
        for axis, (placement, index) in enumerate(zip(placements, coordinate))
        if isinstance(placement, (Shard, _StridedShard))
    )
    numbers = (*tensor.shape, *itertools.chain.from_iterable(cuts))
    if any(type(number) is not int for number in numbers):  # one for many ranks
        return None
    if is_ambiguous(tensor.shape, cuts):
        raise ValueError(f"{placements} {AMBIGUOUS}")
    runs = cut_runs(tuple(tensor.shape), cuts)
    lengths = tuple(sum(run.length for run in of_dim) for of_dim in runs)
    # FSDP2 shards what TP left. Of 9 rows on (4, 2) its last ranks have 0 and 1, where
    # their placements say 1 and 0.
    if lengths != tuple(local.shape) or 0 in lengths:
        return None
    return runs if math.prod(map(len, runs)) > 1 else None


@lru_cache(maxsize=1024)  # a load asks for each chunk that it reads
def cut_runs(
    shape: tuple[int, ...], cuts: tuple[Cut, ...]
) -> tuple[tuple[Run, ...], ...]:
    """
    >>> cut_runs((8,), (Cut(dim=0, split_factor=2, num_chunks=2, coordinate=0),))[0]
    (Run(offset=0, local_offset=0, length=2), Run(offset=4, local_offset=2, length=2))
    """
    runs = [[Run(0, 0, length)] for length in shape]
    for dim, split_factor, num_chunks, coordinate in cuts:
        length = sum(run.length for run in runs[dim])
        pieces = []
        for piece in range(split_factor):
            size, start = Shard.local_shard_size_and_offset(length, split_factor, piece)
            own, offset = Shard.local_shard_size_and_offset(
                size, num_chunks, coordinate
            )
            pieces.append((start + offset, own))
        runs[dim] = _narrow(runs[dim], pieces)
    return tuple(map(tuple, runs))


def is_ambiguous(shape: Sequence[int], cuts: Sequence[Cut]) -> bool:
    """True if a strided shard is one that FSDP makes, and the placements say other rows
    than FSDP holds: over another strided shard, or unevenly beside one. Of 16 rows on a
    (2, 2) mesh, tensor parallelism with a split factor of 2 gives its first rank the
    rows 0 to 3 and 8 to 11, and FSDP that rank's first half. By the placements, both
    with the factor 2, the rank has rows 0, 1, 8 and 9.

    >>> of_fsdp = Cut(0, fsdp_factor(2, 1), 2, 0)
    >>> is_ambiguous((16,), [of_fsdp, Cut(0, 2, 2, 0)])
    True
    >>> is_ambiguous((16,), [Cut(0, 2, 2, 0), Cut(0, 1, 2, 0)])  # over a plain shard
    False
    """

    cuts = [cut for cut in cuts if cut.num_chunks > 1]

    def inner(at: int) -> list[Cut]:
        return [cut for cut in cuts[at + 1 :] if cut.dim == cuts[at].dim]

    def shards(of: Sequence[Cut]) -> int:
        return math.prod(cut.num_chunks for cut in of)

    factors = [(1, shards(inner(at))) for at in range(len(cuts))]  # of chunks of chunks
    lone = [cut for cut, chunks in zip(cuts, factors) if cut.split_factor not in chunks]
    for at, cut in enumerate(cuts):
        others = inner(at)
        plain = [other for other in others if other.split_factor == 1]
        if others and cut.split_factor == fsdp_factor(shards(others), shards(plain)):
            is_strided = cut.split_factor > 1
            is_uneven = is_strided and shape[cut.dim] % shards([cut, *others]) > 0
            if any(other in lone for other in others) or (lone and is_uneven):
                return True
    return False


def _narrow(runs: Sequence[Run], pieces: Sequence[tuple[int, int]]) -> list[Run]:
    """Return what is left of the runs in pieces (first index, length) of the local
    tensor."""
    left: list[Run] = []
    for start, length in pieces:
        for run in runs:
            first = max(start, run.local_offset)
            last = min(start + length, run.local_offset + run.length)
            offset = run.offset + first - run.local_offset
            if first >= last:
                continue
            if left and left[-1].offset + left[-1].length == offset:
                left[-1] = left[-1]._replace(length=left[-1].length + last - first)
            else:
                at = left[-1].local_offset + left[-1].length if left else 0
                left.append(Run(offset, at, last - first))
    return left


def strided_chunks(tensor: DTensor) -> list[ChunkStorageMetadata] | None:
    """Return a chunk for each box that this rank holds, in any case two or more."""
    runs = strided_runs(tensor)
    if runs is None:
        return None
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(
            offsets=torch.Size([run.offset for run in box]),
            sizes=torch.Size([run.length for run in box]),
        )
        for box in itertools.product(*runs)
    ]


def strided_write_items(tensor: DTensor, fqn: str) -> list[WriteItem] | None:
    """Return what saves the boxes that this rank holds, one by one."""
    chunks = strided_chunks(tensor)
    if chunks is None:
        return None
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner_helpers import (
        _create_write_items_for_dtensor,
    )

    whole = _create_write_items_for_dtensor(fqn, tensor)
    data = whole.tensor_data
    if data is None:
        raise AssertionError
    return [
        dataclasses.replace(
            whole,
            index=MetadataIndex(fqn, chunk.offsets),
            tensor_data=dataclasses.replace(data, chunk=chunk),
        )
        for chunk in chunks
    ]


def strided_shard_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor | None:
    """Return the chunk at `index` as a view of the local tensor, for a load to write
    to."""
    runs = strided_runs(tensor)
    if runs is None or index.offset is None:
        return None
    shard = tensor.to_local()
    for dim, (offset, of_dim) in enumerate(zip(index.offset, runs)):
        run = next((run for run in of_dim if run.offset == offset), None)
        if run is None:
            raise ValueError(
                f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}'"
            )
        shard = shard.narrow(dim, run.local_offset, run.length)
    return shard


def strided_part(whole: torch.Tensor, tensor: DTensor) -> torch.Tensor | None:
    """Return what `tensor` holds of a whole tensor, as one tensor of the local
    shape."""
    runs = strided_runs(tensor)
    return None if runs is None else part_at(whole, runs)


def part_at(whole: torch.Tensor, runs: Sequence[Sequence[Run]]) -> torch.Tensor:
    for dim, of_dim in enumerate(runs):
        parts = [whole.narrow(dim, run.offset, run.length) for run in of_dim]
        parts = parts or [whole.narrow(dim, 0, 0)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def require_one_chunk_each(items: Sequence[WriteItem]) -> None:
    """Raise ValueError if these items save several chunks of one tensor. A safetensors
    file has one entry a name, so the last would take the place of the others."""
    names: set[str] = set()
    for item in items:
        fqn = item.index.fqn
        if fqn in names:
            raise ValueError(
                f"A safetensors file takes one chunk of a tensor, and this rank has "
                f"several of '{fqn}', whose shard is strided. Save it with another "
                "writer, or redistribute it to Shard() or Replicate() first."
            )
        names.add(fqn)
