"""`Servers`: the clients of several vLLM servers as one, of which some may fail. Only the standard library is used."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

SOON = 1.0  # seconds that a round waits for servers that are initialized again
logger = logging.getLogger("torch_overlay")


class Servers:
    """Calls several servers at the same time. One that fails is left out, and initialized again when the next round
    begins; it takes part as soon as that is done.

    Args:
        clients: of the servers, which are called "server 0", "server 1", and so on.
        timeout: seconds that a server may take to be initialized, and to begin and finish a round.
    """

    def __init__(self, clients: Sequence[Any], timeout: float) -> None:
        self._clients = {f"server {number}": client for number, client in enumerate(clients)}
        self._timeout = timeout
        self._info: dict[str, Any] = {}
        self._ready: set[str] = set()  # those that are initialized, and haven't failed since
        self._round: set[str] = set()  # those that take part in this round
        self._busy: set[str] = set()  # those that haven't answered the last call
        self._changed = threading.Condition()  # of a lock that one thread may take twice

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Note what servers are told when they are initialized."""
        self._info = init_info

    def start_weight_update(self) -> None:
        """Initialize the servers that aren't, and begin a round on all that can."""
        new = self._clients.keys() - self._ready - self._busy
        seconds = SOON if self._ready else self._timeout
        self._call(new, lambda name, its: its.init_weight_transfer_engine({**self._info, "name": name}), seconds, True)
        self._round = {*self._ready}
        self._call(self._round, lambda name, its: its.start_weight_update(), self._timeout)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers of all servers that began take part in a run."""
        self._call(self._round, lambda name, its: its.update_weights(update_info), None)

    def finish_weight_update(self) -> None:
        """End the round on those servers."""
        self._call(self._round, lambda name, its: its.finish_weight_update(), self._timeout)

    def leave_out(self, names: Iterable[str]) -> None:
        """Go on with this round without these servers."""
        with self._changed:
            self._ready.difference_update(names)
            self._round.difference_update(names)
            self._changed.notify_all()

    def leave_out_others(self, names: Collection[str]) -> None:
        """Go on with this round with these servers alone."""
        self.leave_out(self._round.difference(names))

    def _call(
        self, names: set[str], call: Callable[[str, Any], object], seconds: float | None, initializes: bool = False
    ) -> None:
        """Call some servers, and wait so long for those that are still among them."""

        def work(name: str) -> None:
            is_ready = initializes
            try:
                call(name, self._clients[name])
            except Exception as error:
                is_ready = False
                logger.warning("%s is left out, until it is initialized again: %s", name, error)
                self.leave_out([name])
            with self._changed:
                self._busy.discard(name)
                if is_ready:
                    self._ready.add(name)
                self._changed.notify_all()

        with self._changed:
            self._busy |= names
        for name in sorted(names):
            threading.Thread(target=work, args=(name,), name=f"torch_overlay calls {name}", daemon=True).start()
        with self._changed:
            if not self._changed.wait_for(lambda: not names & self._busy, seconds):
                self.leave_out(names & self._busy)
