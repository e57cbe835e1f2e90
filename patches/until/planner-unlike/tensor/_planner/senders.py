"""Before digits of different bases are paired."""

from __future__ import annotations


class Diagonal(...):
    """Ranks for which `replica - shard`, two digits of one base, is the same modulo this base.

    From R·S0 to S0·R on (2, 2), rank (0, 1) wants what (0, 0) and (1, 0) hold:

    >>> sender = [0, 0]
    >>> digits = Digit(axis=0, unit=1, base=2), Digit(axis=1, unit=1, base=2)
    >>> Diagonal(*digits).follow(sender, (0, 1))
    >>> sender
    [1, 0]
    """


class Exchange(...):
    def diagonals(self) -> tuple[Diagonal, ...]:
        """Each tied digit of a replica axis with a digit of a shard axis that has its base and isn't tied, if there is
        one left; all within the group.

        Let all cuts be even, let the digits along each dim have the same bases in source and target as far as both go,
        and let the group have all axes that cut source or target. Then no rank sends more than the busiest receives: at
        the place of each tied digit the source has one of the same base, so every tied replica digit finds a partner.
        The shard digits that are then neither tied nor paired multiply what a rank sends by as much as the new boxes
        are longer, where the target is cut less than the source.
        """
        shards, tied = self.shards, self.tied_digits()
        free = [digit for digit in self.cuts([axis for axis in self.axes if axis in shards]) if digit not in tied]
        # First those that don't cut the target: all ranks want the same along them, so that it is easier to tell how
        # much a rank sends.
        free.sort(key=lambda digit: digit.axis in self.after.sharded)
        found = []
        for replica in tied:
            if replica.axis in self.axes and replica.axis not in shards:
                shard = next((digit for digit in free if digit.base == replica.base), None)
                if shard is not None:
                    free.remove(shard)
                    found.append(Diagonal(replica, shard))
        return tuple(found)
