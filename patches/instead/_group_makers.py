"""Upstream the switch is there."""

from __future__ import annotations

from torch.distributed import config as dist_config


def uses_torchcomms() -> bool:
    """Whether groups are made by torchcomms, which has its own way."""
    return dist_config.use_torchcomms
