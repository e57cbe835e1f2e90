"""Refuse to write several chunks of one tensor to one safetensors file.

Such a file has one entry a name, and torch's writer keeps the last chunk alone, without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from ..distributed._torch import original
from ..distributed.tensor._chunks import require_one_chunk_each

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

torchs_write_data: Any = original(HuggingFaceStorageWriter, "write_data")


class _Writer:
    """Bodies of methods of HuggingFaceStorageWriter. Never instantiated."""

    def write_data(self: HuggingFaceStorageWriter, plan: SavePlan, planner: SavePlanner) -> Any:
        """Do what torch's method does, if each tensor of the plan has one chunk."""
        require_one_chunk_each(plan.items)
        return torchs_write_data(self, plan, planner)
