"""Save and load DTensors of which a rank holds several boxes, as of a lone strided shard, by
`torch.distributed.checkpoint`.

Stock describes each shard by one box: it refuses to save such tensors, and loads other rows into them. Here each box is
a chunk, see `distributed/tensor/_chunks.py`. Upstream these are a few lines inside the functions that are replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import _api

from ..distributed._torch import original
from ..distributed.tensor._chunks import strided_chunks, strided_shard_at, strided_write_items

if TYPE_CHECKING:
    import torch
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
        return torchs_write_items(self, fqn, object) if items is None else items

    def __create_chunk_list__(self: DTensor) -> list[ChunkStorageMetadata]:
        """Return the boxes of the whole tensor that this rank holds."""
        chunks = strided_chunks(self)
        return torchs_chunk_list(self) if chunks is None else chunks

    def __get_tensor_shard__(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        """Return the part of the local tensor that is the chunk at `index`, as a view."""
        shard = strided_shard_at(self, index)
        return torchs_shard(self, index) if shard is None else shard
