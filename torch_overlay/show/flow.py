"""`FlowExplanation`: who sends how many bytes to whom when many tensors move, on one mesh or to another.

It counts the bytes of exchanges, and not those of reductions before them. This file imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..distributed._mesh.text import of_ranks
from ..transfers._planner.routes import Move
from ..transfers._planner.schedule import Flow
from ..transfers._planner.sides import Ranks, Side
from ..transfers.options import BUDGET
from . import screen
from .typed import Placement, regions
from .words import aligned, counted, fitted, size_text

End = tuple[Sequence[Placement], tuple[int, ...], tuple[int, ...]]  # placements, sizes and ranks of a mesh

MATRIX = 8  # at most this many ranks are printed as a matrix
SHOWN = 32  # at most this many ranks have a row in the table
LISTED = 24  # a list of ranks has at most this many characters


@dataclass(frozen=True, repr=False)
class FlowExplanation(screen.Shown):
    """What the overlay would send to move many tensors. Prints as a table.

    Attributes:
        tensors: how many tensors there are, including those that don't move.
        size: the bytes of all of them, each element counted once.
        sources: the ranks that hold them before.
        targets: the ranks that hold them after.
        flow: what ranks send to one another.
        budget: the limit on buffers, in bytes.
        alone: how many tensors are redistributed one by one: those with a pending reduction, and those that move along
            axes for which there is no joint group.
        reduced: how many tensors are reduced one by one before they move to another mesh.
        hosts: on which host each rank is; empty if that isn't known.
        way: whether elements are passed on between hosts, and why, in words; "" if nothing had to be decided.
    """

    tensors: int
    size: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    flow: Flow
    budget: int
    alone: int = 0
    reduced: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict)
    way: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.sources, *self.targets}))

    def lines(self, width: int = screen.NARROW) -> list[str]:
        way = f"from {of_ranks(self.sources)} to {of_ranks(self.targets)}"
        where = f"on {of_ranks(self.sources)}" if self.sources == self.targets else way
        title = f"{counted(self.tensors, 'tensor')}, {size_text(self.size)}, {where}"
        head = [*screen.styled(fitted(title, width), "title")]
        head += screen.styled(fitted(f"overlay: {self.steps()}", width), "side")
        head += screen.styled(fitted(self.way, width), "side") if self.way else []
        if not self.flow.sent:
            return head
        # A matrix of more ranks is wider than a terminal; then each rank has a row.
        fits = len(self.ranks) <= MATRIX
        table = self._matrix() if fits else self._table(width)
        notes = ["bytes that the rank of a row sends to the rank of a column"] if fits else []
        notes += ["exchanges only; what reductions send isn't counted"] if self.reduced else []
        return [*head, "", *screen.headed(table), "", *screen.styled(notes, "why"), *self._links()]

    def save(self, path: str) -> None:
        """Write a picture of who sends what to whom. The ending of `path` chooses the format."""
        from .pictures import draw_flow

        draw_flow(self.ranks, self.flow.sent, self.lines(), path, self.hosts)

    def steps(self) -> str:
        """What the overlay does, as one line."""
        exchanges = self.flow.exchanges
        steps = [counted(self.reduced, "reduction")] if self.reduced else []
        # Without any step at all it says "0 exchanges", since an empty line would read like an error.
        steps += [counted(exchanges, "exchange")] if exchanges or not (self.reduced or self.alone) else []
        steps += [f"{counted(self.alone, 'tensor')} one by one"] if self.alone else []
        total = f"; {size_text(sum(self.flow.sent.values()))} in all" if self.flow.sent else ""
        buffers = f"; buffers of {size_text(self.flow.staged)} on a rank at most" if self.flow.staged else ""
        return f"{', '.join(steps)}{total}{buffers} (budget {size_text(self.budget)})"

    def sums(self) -> tuple[Counter[int], Counter[int]]:
        """For each rank, the bytes that it sends, and those that it gets."""
        out, into = Counter[int](), Counter[int]()
        for (sender, receiver), size in self.flow.sent.items():
            out[sender] += size
            into[receiver] += size
        return out, into

    def links(self) -> tuple[Counter[str], Counter[str]]:
        """For each host, the bytes that go out over its link, and those that come in."""
        out, into = Counter[str](), Counter[str]()
        for (sender, receiver), size in self.flow.sent.items():
            if self.hosts and self.hosts[sender] != self.hosts[receiver]:
                out[self.hosts[sender]] += size
                into[self.hosts[receiver]] += size
        return out, into

    def _links(self) -> list[str]:
        """A row for each of the first hosts, if there are several: its ranks, and what its link carries."""
        on_host: dict[str, list[int]] = {}
        for rank in self.ranks if self.hosts else ():
            on_host.setdefault(self.hosts[rank], []).append(rank)
        if len(on_host) < 2:
            return []
        out, into = self.links()
        rows = [("host", "ranks", "out", "in")]
        for host, ranks in [*on_host.items()][:SHOWN]:
            rows.append((host.split()[0], self._named(ranks), _bytes_text(out[host]), _bytes_text(into[host])))
        return ["", *screen.headed(aligned(rows, right=(2, 3)))]

    def _matrix(self) -> list[str]:
        out, into = self.sums()
        rows = [("from\\to", *map(str, self.ranks), "sends")]
        for rank in self.ranks:
            cells = [_bytes_text(self.flow.sent[rank, peer]) if peer != rank else "" for peer in self.ranks]
            rows.append((str(rank), *cells, _bytes_text(out[rank])))
        rows.append(("gets", *[_bytes_text(into[rank]) for rank in self.ranks], ""))
        return aligned(rows, right=range(1, len(rows[0])))

    def _table(self, width: int) -> list[str]:
        """A row for each of the first ranks: how much it sends and gets, and with whom."""
        out, into = self.sums()
        rows: list[tuple[str, ...]] = [("rank", "sends", "gets", "to", "from")]
        for rank in self.ranks[:SHOWN]:
            # Those that the rank sends to, and those that it gets from.
            peers = [[pair[1 - side] for pair in self.flow.sent if pair[side] == rank] for side in (0, 1)]
            rows.append(
                (str(rank), _bytes_text(out[rank]), _bytes_text(into[rank]), *[self._named(some) for some in peers])
            )
        lines = [line for row in aligned(rows, right=(0, 1, 2)) for line in fitted(row, width)]
        if len(self.ranks) <= SHOWN:
            return lines
        most = f"the busiest sends {size_text(max(out.values()))}, gets {size_text(max(into.values()))}"
        return [*lines, f"... {len(self.ranks)} ranks; {most}"]

    def _named(self, peers: list[int]) -> str:
        """Ranks as text: ``all others``, a list with runs (``0-3, 6``), or their number if that is too long."""
        if len(peers) == len(self.ranks) - 1:
            return "all others"
        runs: list[list[int]] = []
        for rank in sorted(peers):
            if runs and rank == runs[-1][1] + 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        text = ", ".join([str(first) if first == last else f"{first}-{last}" for first, last in runs])
        return text if len(text) <= LISTED else f"{len(peers)} ranks"


def _bytes_text(size: int) -> str:
    """A number of bytes in few characters, for a cell of a table; a dot for none."""
    return size_text(size).replace(" ", "").removesuffix("iB").removesuffix("B") if size else "·"


def of_words(
    shape: tuple[int, ...], source: End, target: End, itemsize: int, tensors: int = 1, budget: int = BUDGET
) -> FlowExplanation:
    """Explain a move of equal tensors. No process group is made.

    >>> from .typed import Replicate, Shard
    >>> print(of_words((8, 8), ([Shard(0)], (2,), (0, 1)), ([Replicate()], (2,), (2, 3)), itemsize=4))
    1 tensor, 256 B, from ranks 0, 1 to ranks 2, 3
    overlay: 1 exchange; 512 B in all; buffers of 256 B on a rank at most (budget
      256 MiB)
    <BLANKLINE>
    from\\to  0  1    2    3  sends
    0           ·  128  128    256
    1        ·     128  128    256
    2        ·  ·         ·      ·
    3        ·  ·    ·           ·
    gets     ·  ·  256  256
    <BLANKLINE>
    bytes that the rank of a row sends to the rank of a column
    """
    if tensors < 1:
        raise ValueError(f"--tensors needs 1 or more, got {tensors}")
    before, after = (regions(placements, shape, sizes) for placements, sizes, _ in (source, target))
    if after.pending:
        raise ValueError(f"a tensor can't get a pending reduction on another mesh; asked for {after}")
    ends = [Ranks.of(ranks, sizes) for _, sizes, ranks in (source, target)]
    if before.pending:
        raise ValueError(f"a tensor is reduced before it goes to another mesh: explain that by itself; got {before}")
    moves = [Move(Side(before, ends[0]), Side(after, ends[1]), itemsize)] * tensors
    flow = Flow.of(moves, budget)
    size = tensors * math.prod(shape) * itemsize
    return FlowExplanation(tensors, size, tuple(sorted(ends[0].ranks)), tuple(sorted(ends[1].ranks)), flow, budget)
