"""Before terms are added."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ._pack import Local, Place, Stages, assembled, packing, unpacking
from ._planner.grids import grids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._joint_groups import Group
    from ._planner.boxes import Box
    from ._planner.steps import AllToAll, Piece


def all_to_all(step: AllToAll, place: Place, group: Group, finish: Local) -> Stages:
    """Pack, exchange and unpack: by one permute where all pieces are alike, else piece by piece. `finish` gets what
    the collective returns, and waits for it."""
    coordinate, held, wanted = place
    to_pack, to_unpack = grids(step, held, wanted) if group.in_order else (None, None)
    if to_pack is not None and to_unpack is not None:
        ranks = len(group.places)
        sent, received = (elements // ranks for elements in (math.prod(to_pack.expanded), wanted.elements))
        exchange = swap([sent] * ranks, [received] * ranks, group, finish)
        return packing(to_pack), exchange, unpacking(to_unpack, wanted.length)
    sends, receives = step.sends(coordinate), step.receives(coordinate)
    send_splits, receive_splits = splits(sends, group), splits(receives, group)
    pack = never_nothing(
        pack_pieces(sends, group), send_splits, receive_splits, group, group.places[own_member(step, coordinate)]
    )
    land = landing(receives, receive_splits, group, wanted.length)
    return pack, swap(send_splits, receive_splits, group, finish), land


def landing(receives: Sequence[Piece], receive_splits: Sequence[int], group: Group, shape: Sequence[int]) -> Local:
    """From what arrived to the local tensor."""
    pieces = offsets(receives, receive_splits, group)
    return lambda flat: assembled(flat, pieces, shape)


def offsets(receives: Sequence[Piece], receive_splits: Sequence[int], group: Group) -> list[tuple[int, Box]]:
    """Where each piece lies in what arrived."""
    starts = [0, *itertools.accumulate(receive_splits)]
    return [(starts[group.places[piece.member]], piece.box) for piece in receives]


_REDUCE = ...
Landing = ...
_reduced = ...
combine = ...
