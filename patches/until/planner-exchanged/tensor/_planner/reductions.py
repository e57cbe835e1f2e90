"""Before reductions by all-to-alls, and one group at a time."""


class Reduction(...):
    def _ways(self) -> Ways:
        """The ways, each with its place: of plans that cost the same, that of the least place is taken. The ways stand
        in another order, in which they are asked: those that bring few elements come first, so that most plans of the
        others are dropped by their beginnings."""
        return (2, self.scattered), (1, self.part_whole), (3, self.moved_first), (0, self.whole)
