"""A checkpoint's hooks say each box that a rank holds."""

from __future__ import annotations

from ._chunks import strided_chunks, strided_shard_at, strided_write_items


class DTensor:
    def __create_write_items__():
        if (items := strided_write_items(self, fqn)) is not None:
            return items
        if hasattr(self._local_tensor, "__create_write_items__"):
            ...

    def __create_chunk_list__():
        if (chunks := strided_chunks(self)) is not None:
            return chunks
        if hasattr(self._local_tensor, "__create_chunk_list__"):
            ...

    def __get_tensor_shard__():
        if (shard := strided_shard_at(self, index)) is not None:
            return shard
        if hasattr(self._local_tensor, "__get_tensor_shard__"):
            ...
