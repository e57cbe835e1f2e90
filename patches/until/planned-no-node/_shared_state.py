"""Before redistributions remember the specs in which they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tensor._answers import Answer
    from .tensor._joint_groups import AtHand
    from .tensor._question import Question
    from .tensor._site import Site


@dataclass
class Remembered:
    """What redistributions over the meshes of a universe found out.

    Attributes:
        at_hand: the groups of each mesh.
        answers: to questions, each made once.
    """

    at_hand: dict[Site, AtHand] = field(default_factory=dict)
    answers: dict[Question, Answer] = field(default_factory=dict)
