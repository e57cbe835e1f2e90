"""Before it is asked which dims the plans for a reduction would cut."""

from __future__ import annotations


class Scatters(...):
    tried = ...

    def _cut_on(self, regions: Regions, dim: int, axes: list[int]) -> Regions:
        orders = regions.orders
        return regions.cut((*orders[:dim], orders[dim] + tuple(axes), *orders[dim + 1 :]))
