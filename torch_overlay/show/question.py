"""What `explain` is asked: one tensor, its two specs and the mesh, in the planner's terms. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from ..distributed._mesh_layout import row_major
from ..distributed.tensor._planner.cost import Cost
from ..distributed.tensor._planner.forms import shared_plan
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._planner.steps import Step
from ..hints import did_you_mean

Topology = tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class Question:
    """A redistribution to explain.

    Attributes:
        words: the placements before and after, as one reads them.
        shape: of the tensor.
        sizes: of the mesh, by axis.
        source: what each coordinate holds before; None if its shards are no boxes.
        target: and after.
        refused: why the overlay leaves this to torch's own code, if it does.
        names: of the mesh's axes.
        ranks: of the mesh, row-major over its axes.
        dtype: its name.
        itemsize: bytes of an element.
        groups: the sets of axes for which the overlay finds a group; None for all of them.
        cost: how long a collective takes.
        named: whether the mesh itself has these names.
    """

    words: tuple[str, str]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Regions | None
    target: Regions | None
    refused: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    dtype: str
    itemsize: int
    groups: frozenset[tuple[int, ...]] | None
    cost: Cost
    named: bool = True

    def planned(self, all_groups: bool = False) -> tuple[Step, ...]:
        """The overlay's plan, with the groups at hand or as if there were one for each set of axes.

        Raises:
            NotPlanned: torch's own code has to run.
        """
        if self.refused or self.source is None or self.target is None:
            raise NotPlanned(self.refused or "shards that are no boxes")
        return shared_plan(self.source, self.target, self.itemsize, None if all_groups else self.groups, self.cost)


def laid_out(sizes: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ranks of a mesh, row-major over its axes, that are numbered along the axes in this order, slowest first.

    >>> laid_out((2, 3), (1, 0))  # along the first axis first, so rank 1 is at coordinate (1, 0)
    (0, 2, 4, 1, 3, 5)

    Raises:
        ValueError: the order doesn't name each axis once.
    """
    order = tuple(range(len(sizes))) if order is None else order
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(f"an order of {len(sizes)} axes names each of them once, got {order}")
    strides = dict(zip(order, row_major([sizes[axis] for axis in order])))
    ranks = [0]
    for axis, size in enumerate(sizes):
        ranks = [rank + step * strides[axis] for rank in ranks for step in range(size)]
    return tuple(ranks)


def groups_at_hand(
    flatten: str, sizes: tuple[int, ...], flattened: list[tuple[int, ...]]
) -> frozenset[tuple[int, ...]] | None:
    """For which sets of axes a new mesh has a group, by `options.flatten`.

    Args:
        flattened: the sets of axes that the user flattened.
    """
    if flatten == "create":
        return None
    found = {tuple(sorted(axes)) for axes in flattened}
    if flatten == "whole":
        found.add(tuple(axis for axis, size in enumerate(sizes) if size > 1))
    return frozenset(found)


def cost_of(names: tuple[str, ...], topology: Topology | None) -> Cost:
    """The cost model with what is known of the axes; the others are as the model assumes."""
    if missing := sorted({name for name, *_ in topology or ()} - set(names)):
        hint = did_you_mean(missing[0], names)
        raise ValueError(f"the topology names {', '.join(missing)}, but the mesh's axes are {', '.join(names)}{hint}")
    return Cost.of(names, topology)
