"""Phases: what is reduced and then exchanged together, so that results of reductions stay within the budget, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._planner.flow import held
from .pending import Term, reduced
from .runs import free

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ._planner.reductions import Portion
    from ._planner.schedule import AnyMove
    from .runs import Locals


def room(parts: Sequence[Portion], moves: Sequence[AnyMove], budget: int) -> int:
    """What of a budget is left for exchanges while the results of reductions are held."""
    return budget - held(parts, moves)


def reduce_parts(
    parts: Sequence[Portion], meshes: Sequence[DeviceMesh | None], locals_: Locals
) -> list[torch.Tensor | None]:
    """What this rank has to give in a phase, by the place of the part; nothing is pending any more."""
    terms = []
    for place, (number, reduction, slab, _) in enumerate(parts):
        mesh, local = meshes[number], locals_[number]
        if reduction is not None and mesh is not None and local is not None:
            terms.append(Term(place, local.detach(), mesh, reduction, slab))
    results = reduced(terms)
    return [results.get(place, locals_[part.number]) for place, part in enumerate(parts)]


def free_results(parts: Sequence[Portion], sources: Locals) -> None:
    """Give back the memory of what `reduce_parts` made."""
    for part, source in zip(parts, sources):
        if part.reduction is not None and source is not None:
            free(source)
