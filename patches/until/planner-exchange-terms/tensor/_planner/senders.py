"""Before an all-to-all brings terms that are reduced."""

from __future__ import annotations


class Exchange(...):
    """What an all-to-all does: from these boxes to those, over a group."""

    reduced = ...

    @property
    def shards(self) -> frozenset[int]:
        """The axes of the whole mesh along which ranks hold different parts."""
        return self.before.sharded
