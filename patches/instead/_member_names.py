"""Upstream a split says its parent, so that all ranks are the world's, and one count serves them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

making_for_mesh = ...


def for_mesh(make):
    return make


class MemberNames(...):
    def __init__(self, what: str = "group") -> None:
        self._what = what
        self._made: Counter[Sequence[int]] = Counter()

    def next(self, ranks: Sequence[int]) -> str:
        """A name for the next group of these ranks, in this order."""
        made = compact(ranks)
        self._made[made] += 1
        text = f"{self._what} {self._made[made]} of ranks {made}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
