"""Save and load DTensors of which a rank holds several boxes, as of a lone strided shard, by
`torch.distributed.checkpoint`.

Stock describes each shard by one box: it refuses to save such tensors, and loads other rows into them. Here each box is
a chunk, see `distributed/tensor/_chunks.py`. Upstream these are a few lines inside the functions that are replaced.

FSDP2 x TP of uneven lengths is one box, and for some lengths not the one that torch reads from the placements, see
`strided.py`. Of 17 rows on (4, 2) stock saves a checkpoint that it can't load. `fsdp2_chunk` reads what FSDP2 made.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import _api
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ..distributed._torch import original
from ..distributed.tensor._chunks import HOOKS, Cut, cut_runs, strided_chunks, strided_shard_at, strided_write_items
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._runner.specs import read_cuts

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor

torchs_write_items: Any = original(_api.DTensor, "__create_write_items__")
torchs_chunk_list: Any = original(_api.DTensor, "__create_chunk_list__")
torchs_shard: Any = original(_api.DTensor, "__get_tensor_shard__")


class _DTensor:
    """Bodies of methods of DTensor. Never instantiated."""

    def __create_write_items__(self: DTensor, fqn: str, object: Any) -> list[WriteItem]:
        """Return what saves this rank's part, an item a box."""
        items = strided_write_items(self, fqn)
        if items is not None:
            return items
        items = torchs_write_items(self, fqn, object)
        chunk = fsdp2_chunk(self)
        if chunk is not None:
            from torch.distributed.checkpoint.metadata import MetadataIndex

            (item,) = items
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items = [dataclasses.replace(item, index=MetadataIndex(fqn, chunk.offsets), tensor_data=data)]
        return items

    def __create_chunk_list__(self: DTensor) -> list[ChunkStorageMetadata]:
        """Return the boxes of the whole tensor that this rank holds."""
        chunks = strided_chunks(self)
        if chunks is not None:
            return chunks
        chunk = fsdp2_chunk(self)
        return torchs_chunk_list(self) if chunk is None else [chunk]

    def __get_tensor_shard__(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        """Return the part of the local tensor that is the chunk at `index`, as a view."""
        shard = strided_shard_at(self, index)
        return torchs_shard(self, index) if shard is None else shard


def fsdp2_chunk(tensor: DTensor) -> ChunkStorageMetadata | None:
    """Return the chunk of a chunk that this rank holds, if the local tensor has its shape, and not the one that torch
    reads."""
    placements, mesh, local = tensor.placements, tensor.device_mesh, tensor._local_tensor
    kinds = tuple(map(type, placements))
    if _StridedShard not in kinds or not {*kinds} <= {Replicate, Shard, _StridedShard}:
        return None
    coordinate, shape = mesh.get_coordinate(), tuple(tensor.shape)
    if coordinate is None or any(type(number) is not int for number in (*coordinate, *shape)):
        return None
    held = None if any(hasattr(local, hook) for hook in HOOKS) else _told_apart(placements, kinds, shape, mesh.shape)
    if held is None:
        return None
    box = held.box(coordinate)
    cuts = [_torchs_cuts(placements, held.sizes, coordinate, dim) for dim in range(len(shape))]
    torchs = tuple([_length(length, of_dim) for length, of_dim in zip(shape, cuts)])
    if tuple(local.shape) != box.length or box.length == torchs:
        return None
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    # Torch places an empty chunk behind the end, where no other chunk begins.
    starts = [start if own else length for start, own, length in zip(box.start, box.length, shape)]
    return ChunkStorageMetadata(torch.Size(starts), torch.Size(box.length))


@lru_cache(maxsize=1024)  # the kinds are a part of the key: a subclass of Shard may compare equal to it
def _told_apart(placements: Any, kinds: Any, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Regions | None:
    """Return the regions of a chunk of a chunk, if torch reads others, and local shapes tell each rank which it has."""
    try:
        cuts = read_cuts(placements, None, len(shape), tuple(sizes))
    except NotPlanned:
        return None
    held, differ = Regions(shape, tuple(sizes), cuts.orders, cuts.partial), False
    for dim in cuts.reordered_dims:
        if shape[dim] % math.prod([sizes[axis] for axis in held.orders[dim]]) == 0:
            continue
        places = [range(size) if axis in held.orders[dim] else (0,) for axis, size in enumerate(sizes)]
        for coordinate in itertools.product(*places):
            start, own = held.span(dim, coordinate)
            (runs,) = cut_runs((shape[dim],), _torchs_cuts(placements, sizes, coordinate, dim))
            if own != sum([run.length for run in runs]):
                differ = True
            elif own and (len(runs) > 1 or runs[0].offset != start):
                return None  # of 27 rows on (3, 4), rank (2, 2) has row 20, and torch reads row 26
    return held if differ else None


def _torchs_cuts(placements: Any, sizes: Any, coordinate: Any, dim: int) -> tuple[Cut, ...]:
    return tuple(
        [
            Cut(0, getattr(placement, "split_factor", 1), size, index)
            for placement, size, index in zip(placements, sizes, coordinate)
            if getattr(placement, "dim", None) == dim
        ]
    )


def _length(length: int, cuts: tuple[Cut, ...]) -> int:
    return sum([run.length for run in cut_runs((length,), cuts)[0]])
