"""A run in the background: the exchanges of a transfer on a thread, while the program goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from .runs import Locals


class Running:
    """A run that goes on. The targets are undefined until `wait`."""

    def __init__(self, run: Callable[[], None], ended: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._is_heard = False
        self._run: Callable[[], None] | None = run
        self._ended = ended
        self._thread = threading.Thread(target=self._go, name="torch_overlay Transfer", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        run, self._run = self._run, None  # which has the tensors
        try:
            if run is not None:
                run()
        except BaseException as error:
            self._error = error
        finally:
            del run
            self._ended()

    def sent(self) -> bool:
        """Whether the sources may be changed: they aren't read any more on this rank."""
        return not self._thread.is_alive()

    def is_completed(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the targets are whole. Raises as `Transfer.run`, each time that it is called."""
        self._thread.join()
        self._is_heard = True
        if self._error is not None:
            raise self._error

    def unheard(self) -> list[str]:
        """The error of a run that has ended, in words, if nobody waited for it."""
        return [] if self._is_heard or self._error is None else [f"of the last run nobody waited for: {self._error}"]


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None of one that doesn't count."""
    return None if tensor.is_inference() else tensor._version


def copies(locals_: Locals, room: int) -> tuple[list[torch.Tensor | None], list[str]]:
    """The same values in memory of their own; and that there is no room for them, in words, if there isn't."""
    each = {id(local): local for local in locals_ if local is not None}
    size = sum([local.nbytes for local in each.values()])
    if size > room:
        return [*locals_], [f"a snapshot takes {size} bytes, and {room} of the budget are left: give a larger budget="]
    with torch.no_grad():
        copied = {key: local.detach().clone() for key, local in each.items()}
    return [None if local is None else copied[id(local)] for local in locals_], []
