"""Before reductions by all-to-alls, and one group at a time."""


class Reduction(...):
    def _ways(self) -> Ways:
        """The ways, each with its place among equals. The lean ones are asked first, so that most of the others are
        known to bring too much by their beginnings."""
        return (2, self.scattered), (1, self.part_whole), (3, self.moved_first), (0, self.whole)
