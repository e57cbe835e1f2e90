"""What a plan cut before counts, too."""

from __future__ import annotations


def _optimize_transform_infos():
    def try_create_flattened(infos):
        _cuts_evenly(..., earlier=transform_infos[:i])
        src = ...
