"""Before large tensors are packed and unpacked with fewer copies."""

import torch


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Blocks, each row-major and one after the other, in a flat tensor; of a single contiguous one, a view."""
    if parts[0].ndim and all(part.shape[1:] == parts[0].shape[1:] for part in parts):
        return flattened(torch.cat(parts) if len(parts) > 1 else parts[0])
    return torch.cat([part.reshape(-1) for part in parts])


LARGE = ...
is_large = ...
may_change = ...
unpacking_in_place = ...
