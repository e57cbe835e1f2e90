"""Before equal pieces are packed and unpacked by one permute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._pack import Local, Place, Stages

if TYPE_CHECKING:
    from ._joint_groups import Group
    from ._planner.steps import AllToAll


def all_to_all(step: AllToAll, place: Place, group: Group, finish: Local) -> Stages:
    """Pack, exchange and unpack, piece by piece. `finish` gets what the collective returns, and waits for it."""
    coordinate, _, wanted = place
    sends, receives = step.sends(coordinate), step.receives(coordinate)
    send_splits, receive_splits = splits(sends, group), splits(receives, group)
    pack = never_nothing(
        pack_pieces(sends, group), send_splits, receive_splits, group, group.places[own_member(step, coordinate)]
    )
    land = landing(receives, receive_splits, group, wanted.length)
    return pack, swap(send_splits, receive_splits, group, finish), land
