"""Before digits of different bases are paired."""

from __future__ import annotations


class Exchange(...):
    def diagonals(self) -> tuple[Diagonal, ...]:
        """Each tied digit of a replica axis with a digit of a shard axis that has its base and isn't tied, if there is
        one left; all within the group.

        Where all cuts are even and made of the same primes, and the group has all axes that cut source or target, no
        rank sends more than the busiest receives.
        """
        shards, tied = self.shards, self.tied_digits()
        free = [digit for digit in self.cuts(shards.intersection(self.axes)) if digit not in tied]
        # First those that don't cut the target: all ranks want the same along them, so that it is easier to tell how
        # much a rank sends.
        free.sort(key=lambda digit: (digit.axis in self.after.sharded, digit.axis, -digit.unit))
        found = []
        for replica in tied:
            if replica.axis in self.axes and replica.axis not in shards:
                shard = next((digit for digit in free if digit.base == replica.base), None)
                if shard is not None:
                    free.remove(shard)
                    found.append(Diagonal(replica, shard))
        return tuple(found)
