"""Before axes that share nothing ask here, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._group_kind import Kind
from ._group_table import Key
from ._member_names import compact
from ._settings import get_settings
from ._universe import making_private

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._universe import Universe


def _keys(request: Request, copies: Sequence[Sequence[int]]) -> list[Key]:
    """The keys of all copies, in the lane that the options give to the axis."""
    # A group of one rank is no communicator. With one for each name, a loop that destroys the groups of all axes works.
    named = get_settings().share_groups == "names" or request.view.layout.numel() == 1
    lane = request.name if named and not request.joint else None
    return [Key(compact(ranks), Kind.of(request.override), lane) for ranks in copies]


def _shares_nothing(universe: Universe, request: Request) -> bool:
    """Whether an axis gets a group that no other axis ever gets, be it in the same universe."""
    return making_private.get() and not universe.private and not request.joint
