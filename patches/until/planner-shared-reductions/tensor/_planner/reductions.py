"""Before it is asked which dims the plans for a reduction would cut."""

from __future__ import annotations


class Reduction(...):
    tried = ...

    def __post_init__(self) -> None:
        self.scatters = Scatters(self.before, self.after, self.axes, self.groups)
        self.crossed = crossed(self.before, self.after)
