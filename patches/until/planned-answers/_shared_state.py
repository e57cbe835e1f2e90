"""Before redistributions remember their plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tensor._joint_groups import AtHand
    from .tensor._site import Site


@dataclass
class Remembered:
    """What redistributions over the meshes of a universe found out.

    Attributes:
        at_hand: the groups of each mesh.
    """

    at_hand: dict[Site, AtHand] = field(default_factory=dict)
