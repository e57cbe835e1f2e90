"""With `changes`, a run between hosts goes by one of two ways: what changed straight from the sources, or everything
passed on from host to host. All ranks take the one whose busiest link has less. Start at `EitherWay.run`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .exchanges import GOING, ToPassOn
from .hosts import Links, is_better
from .stats import added

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .blocks import Locals
    from .changes import ChangesOnly, Kept
    from .exchanges import AnyExchanges, Going


class EitherWay:
    """Exchanges of changes, and those that pass everything on. See `AnyExchanges`.

    What a sender keeps is in `direct`, and is what it would have sent there, also after a run of `relayed`.

    Args:
        direct, relayed: over the same local tensors.
        hosts: on which one each rank is.
        busiest: the bytes that the busiest link has if all is passed on.
    """

    def __init__(self, direct: ChangesOnly, relayed: AnyExchanges, hosts: Mapping[int, str], busiest: int) -> None:
        self._direct, self._relayed, self._hosts, self._busiest = direct, relayed, hosts, busiest
        self._ran: AnyExchanges = relayed  # as the first run will
        self.label, self.reads, self.written = "", direct.reads | relayed.reads, frozenset[int]()
        direct.passes_on = self._passes_on

    @property
    def count(self) -> int:
        return self._ran.count

    @property
    def staging(self) -> int:
        return max(self._direct.staging, self._relayed.staging)

    @property
    def seconds(self) -> dict[str, float]:
        return added([self._direct.seconds, self._relayed.seconds if self._ran is self._relayed else {}])

    @property
    def sent_bytes(self) -> int:
        return self._ran.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._ran.received_bytes

    @property
    def changed(self) -> tuple[int, int]:
        return self._direct.changed

    def _passes_on(self, out: Sequence[int], into: Sequence[int]) -> bool:
        """Decide by the bytes that the first exchange would send from this rank to each, and bring. Collective."""
        team, links = self._direct.team, Links(Counter(), Counter())
        own = self._hosts[team.rank]
        away = [place for place, rank in enumerate(team.ranks) if self._hosts[rank] != own]
        rows = team.gather([sum([sizes[place] for place in away]) for sizes in (out, into)])
        for rank, (sent, came) in zip(team.ranks, rows):
            links.out[self._hosts[rank]] += sent
            links.into[self._hosts[rank]] += came
        return is_better(self._busiest, links.busiest * self._direct.count)

    def run(self, sources: Locals, targets: Locals, going: Going = GOING) -> None:
        """Write all targets. Collective."""
        self._ran = self._direct
        try:
            self._direct.run(sources, targets, going)
        except ToPassOn:  # on all ranks, and nothing was sent
            self._ran = self._relayed
            try:
                self._relayed.run(sources, targets, going)
            except Exception:
                self._direct.forget()
                raise
            self._direct.all_have()
        finally:
            self.written = self._ran.written

    def give(self, labels: Sequence[object]) -> Kept:
        return self._direct.give(labels)

    def take(self, kept: Kept, labels: Sequence[object]) -> None:
        self._direct.take(kept, labels)

    def forget(self) -> None:
        self._direct.forget()
        self._relayed.forget()

    def send_whole_next(self, ranks: Iterable[int] | None = None) -> None:
        self._direct.send_whole_next(ranks)
