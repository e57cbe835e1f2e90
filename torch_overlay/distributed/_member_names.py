"""Names of groups that only their members make; c10d asks for them."""

from __future__ import annotations

import contextvars
import hashlib
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_lock = threading.Lock()

# On while a group is made for a mesh: `new_group` takes no name, and asks for one in the middle.
making_for_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("making_for_mesh", default=False)


def for_mesh(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same constructor, whose ranks are those of a mesh, and not those of a split inside its parent."""

    def making(**how: Any) -> Any:
        token = making_for_mesh.set(True)
        try:
            return make(**how)
        finally:
            making_for_mesh.reset(token)

    return making


class MemberNames:
    """Names by how often exactly these ranks made a group, the same on all of them, whatever other groups they made.

    >>> one, other = MemberNames(), MemberNames()
    >>> _ = other.next([4, 6])  # rank 4 made a group of which rank 5 knows nothing
    >>> one.next([4, 5]) == other.next([4, 5])  # and they still meet under one name
    True
    """

    def __init__(self, what: str = "group") -> None:
        self._what = what
        self._made: Counter[tuple[bool, Sequence[int]]] = Counter()

    def next(self, ranks: Sequence[int]) -> str:
        """A name for the next group of these ranks, in this order."""
        made = (making_for_mesh.get(), compact(ranks))  # a split's ranks count inside its parent: another count
        self._made[made] += 1
        text = f"{self._what} {self._made[made]} of {'mesh' if made[0] else 'split'} ranks {made[1]}"
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
