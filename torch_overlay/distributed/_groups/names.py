"""Names of groups that only their members make; c10d asks for them."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_lock = threading.Lock()


class MemberNames:
    """Names by how often exactly these ranks made a group, the same on all of them, whatever other groups they made.

    >>> one, other = MemberNames(), MemberNames()
    >>> _ = other.next([4, 6])  # rank 4 made a group of which rank 5 knows nothing
    >>> one.next([4, 5]) == other.next([4, 5])  # and they still meet under one name
    True
    """

    def __init__(self, what: str = "group") -> None:
        self._what = what
        self._made: Counter[Sequence[int]] = Counter()

    def next(self, ranks: Sequence[int]) -> str:
        """A name for the next group of these ranks, in this order."""
        made = compact(ranks)
        self._made[made] += 1
        text = f"{self._what} {self._made[made]} of ranks {made}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


_names: weakref.WeakKeyDictionary[Any, MemberNames] = weakref.WeakKeyDictionary()


def member_names(world: Any) -> MemberNames:
    """The names of a world, by its default group; without one it is the world itself that is named."""
    if world is None:
        return MemberNames("world")
    with _lock:
        return _names.setdefault(world, MemberNames())


def compact(ranks: Sequence[int]) -> tuple[int, ...] | range:
    """Ranks as a value; consecutive ones, of which there may be a million, as a range."""
    run = range(ranks[0], ranks[0] + len(ranks)) if ranks else range(0)
    return run if ranks and list(run) == list(ranks) else tuple(map(int, ranks))
