"""Notes: what is wrong on one rank is told to the others, who wait for it in a collective and get an error after the
group's timeout.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_calls: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


@contextmanager
def one_fate(group: ProcessGroup | None, wrong: Sequence[str | None], asks: bool = False) -> Iterator[bool]:
    """For what the ranks of a group do together: if this rank can't, the others hear why. With `asks` at once, before
    anything is sent; else when they gave up waiting, as they do where the backend's `wait` blocks the host (gloo).

    Gives whether something is wrong here.

    Args:
        wrong: what is wrong on this rank; None is nothing.
        asks: whether the ranks ask one another first, by `agreed_count`; the same on all of them.

    Raises:
        ValueError: something is wrong on this rank.
        RuntimeError: something failed; says what was wrong on another rank.
    """
    text = "; ".join(one.removesuffix(".") for one in wrong if one is not None)
    if group is None:
        if text:
            raise ValueError(f"Nothing was redistributed: {text}.")
        yield False
        return
    calls = _calls.setdefault(distributed_c10d._get_default_group(), Counter())
    calls[group.group_name] += 1
    key = f"torch_overlay/{group.group_name}/redistribution {calls[group.group_name]}"
    if text:
        distributed_c10d._get_default_store().set(key, text)
        if not asks:
            raise ValueError(f"Nothing was redistributed: {text}.")
    try:
        yield bool(text)
    except RuntimeError as error:
        if text:
            raise ValueError(f"Nothing was redistributed: {text}.") from None
        store = distributed_c10d._get_default_store()
        if store.check([key]):
            raise RuntimeError(f"Nothing was redistributed: {store.get(key).decode()}.") from error
        raise
