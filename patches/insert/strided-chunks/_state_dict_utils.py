"""A full state from rank 0: each rank takes the rows that it holds."""

from __future__ import annotations


def _distribute_tensors():
    # Not at the top: a build may lack distributed.
    from .tensor._chunks import strided_part

    if (part := strided_part(full_tensor, local_state)) is not None:
        full_tensor, offset = part, [0] * part.ndim
    slices = ...
