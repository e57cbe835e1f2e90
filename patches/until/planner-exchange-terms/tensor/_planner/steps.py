"""Before an all-to-all brings terms that are reduced."""

from __future__ import annotations

from .senders import Exchange


class Piece(...):
    """A block that goes to or comes from a member of the group.

    Attributes:
        member: its place in `members(coordinate)`.
        box: where the block is in the local tensor (before the step for what is sent, after it for what is received).
    """

    add = ...


class AllToAll(...):
    """Each element to whoever wants and lacks it, once.

    To run it: pack `sends(coordinate)`, each at the place of its member; all_to_all_single with one size for each
    member; copy each of `receives(coordinate)` into its box.

    Several ranks of the group may hold the same part of the source. A rank exchanges pieces with one of them for each
    part: these are its `peers`. Without `diagonals` that is the nearest; see `senders`.
    """

    op = ...
    reduced = ...

    @property
    def exchange(self) -> Exchange:
        """What is to be done, without who sends what."""
        return Exchange(self.before, self.after, self.axes)

    def receives(self, coordinate: Coordinate) -> list[Piece]:
        """Where what comes from whom goes, itself included; in the order of `peers`."""
        peers = self.peers(coordinate)
        shared = _shared(self.after.box(coordinate), self.before, peers)
        return [Piece(self._place(peers[i]), box) for i, box in shared]
