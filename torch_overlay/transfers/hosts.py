"""Which ranks share a machine, and whether a `Transfer` passes elements on from one machine to another.

Between machines bytes cost, within one they hardly do. So the bytes out of and into each host are added up, for both
ways, and the way whose busiest link has less wins. All ranks add up the same numbers. Start at `Links.of`.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..show.words import amount
from .checkpoint import boxes_by_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .descriptions import Tensor

# Passing on takes one or two exchanges more, some milliseconds. So without it the busiest link must have so many times
# as many bytes, and so many bytes more.
BETTER, LEAST = 1.1, 1 << 20


def own_host() -> str:
    """Name the machine on which this process is, as NCCL does: ``NCCL_HOSTID``, else the host's name and its boot."""
    given = os.environ.get("NCCL_HOSTID")
    if given:
        return given
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


class Links(NamedTuple):
    """The bytes that a run of all tensors sends out of each host, and into it.

    Attributes:
        out, into: by host.
    """

    out: Counter[str]
    into: Counter[str]

    @property
    def busiest(self) -> int:
        """The most bytes in one direction of a host's link."""
        return max([*self.out.values(), *self.into.values()], default=0)

    @staticmethod
    def of(tensors: Iterable[Tensor], hosts: Mapping[int, str]) -> tuple[Links, Links]:
        """Estimate the links of a run in which each rank gets all that it wants from the sources, and of one in which
        hosts pass on what several of them want. Boxes of a host that overlap in part count for each. Ranks that are
        gone have no host, and send and get nothing."""
        direct, relayed = Links(Counter(), Counter()), Links(Counter(), Counter())
        alike = Counter((tensor.source.ranks, tensor.target, tensor.wire.itemsize) for tensor in tensors)
        for (senders, target, itemsize), times in alike.items():
            wanted: Counter[str] = Counter()  # bytes, by host, each rank's for itself
            unique: Counter[str] = Counter()  # the same, but each box once for each host
            seen: set[tuple[str, object]] = set()
            there = {rank: boxes for rank, boxes in boxes_by_rank(target).items() if rank in hosts}
            for rank, boxes in there.items():
                for box in boxes:
                    size = box.elements * itemsize * times
                    wanted[hosts[rank]] += size
                    if (hosts[rank], box) not in seen:
                        seen.add((hosts[rank], box))
                        unique[hosts[rank]] += size
            different = {box: box.elements for boxes in there.values() for box in boxes}
            once = sum(different.values()) * itemsize * times
            from_host = Counter(hosts[rank] for rank in senders if rank in hosts)
            for host in from_host.keys() | wanted.keys():
                share = from_host[host] / max(
                    from_host.total(), 1
                )  # of what each rank gets, and of what is here already
                direct.into[host] += round(wanted[host] * (1 - share))
                direct.out[host] += round((wanted.total() - wanted[host]) * share)
                relayed.into[host] += round(unique[host] * (1 - share))
                # Each element leaves the sources once, and then each host that wants it passes on its share.
                passed = max(unique.total() - once, 0) * unique[host] / max(unique.total(), 1)
                relayed.out[host] += round(once * share * (1 - unique[host] / max(unique.total(), 1)) + passed)
        return direct, relayed


def is_better(relayed: int, direct: int) -> bool:
    """True if elements are to be passed on: by the bytes of the busiest link with passing on, and without."""
    return max(relayed * BETTER, relayed + LEAST) < direct


def passes_on(tensors: Sequence[Tensor], hosts: Mapping[int, str]) -> tuple[bool, str]:
    """Decide whether elements are passed on between hosts. Also returns why, in words; "" if all ranks are on one."""
    if len({*hosts.values()}) < 2:
        return False, ""
    direct, relayed = Links.of(tensors, hosts)
    is_passed = is_better(relayed.busiest, direct.busiest)
    both = amount(relayed.busiest), amount(direct.busiest)
    way = (
        "passed on, so that the busiest host's link has {} and not {}"
        if is_passed
        else "not passed on, since the busiest host's link has {} with it and {} without"
    )
    return is_passed, f"between {len({*hosts.values()})} hosts elements are {way.format(*both)}"
