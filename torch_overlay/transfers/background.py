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
        self._run, self._ended = run, ended
        self._thread = threading.Thread(target=self._go, name="torch_overlay Transfer", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        finally:
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

    def raise_unheard(self) -> None:
        """The error of a run that has ended, if nobody waited for it."""
        if not self._is_heard:
            self.wait()


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None of one that doesn't count."""
    return None if tensor.is_inference() else tensor._version


def copies(locals_: Locals, room: int) -> tuple[list[torch.Tensor | None], str | None]:
    """The same values in memory of their own; and why there is no room for them, in words, if there isn't."""
    size = sum([local.nbytes for local in locals_ if local is not None])
    if size > room:
        return [*locals_], f"a snapshot takes {size} bytes, and {room} of the budget are left"
    with torch.no_grad():
        return [None if local is None else local.detach().clone() for local in locals_], None
