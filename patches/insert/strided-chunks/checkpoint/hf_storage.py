"""A safetensors file has one entry a name."""

from __future__ import annotations

from ..tensor._chunks import require_one_chunk_each


class HuggingFaceStorageWriter:
    def write_data():
        require_one_chunk_each(plan.items)
        storage_data = ...
