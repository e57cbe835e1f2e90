"""Of a large all-to-all a rank's own part stays where it is until the others' parts have come.

So it is copied once, and takes no memory in what is sent and in what arrives.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from ._exchange import all_to_all, landing, pack_pieces, splits, swap
from ._pack import is_large, part

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ._joint_groups import Group
    from ._pack import Local, Place, Stages
    from ._planner.steps import AllToAll


class Apart(NamedTuple):
    """What goes to the others, or came from them; the rank's own part, a view of the local tensor, which must not
    change until `land` has it; and what to do with both."""

    flat: torch.Tensor
    own: torch.Tensor
    exchange: Local
    land: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def all_to_all_by_size(step: AllToAll, place: Place, group: Group, finish: Local) -> Stages:
    """Pack, exchange and unpack: everything, or of a large message all but the rank's own part."""
    pack, exchange, land = all_to_all(step, place, group, finish)
    elements = max(place.held.elements, place.wanted.elements)
    others = functools.cache(lambda: _others(step, place, group, finish))  # made for the first large one

    def start(local: torch.Tensor) -> torch.Tensor | Apart:
        apart = others() if is_large(local, elements) else None
        return pack(local) if apart is None else apart(local)

    def send(sent: torch.Tensor | Apart) -> torch.Tensor | Apart:
        return sent._replace(flat=sent.exchange(sent.flat)) if isinstance(sent, Apart) else exchange(sent)

    def end(came: torch.Tensor | Apart) -> torch.Tensor:
        return came.land(came.flat, came.own) if isinstance(came, Apart) else land(came)

    return start, send, end


def _others(step: AllToAll, place: Place, group: Group, finish: Local) -> Callable[[torch.Tensor], Apart] | None:
    """Packs all but the rank's own part; None where it has none, or has only this to send or to get."""
    own = step.member(place.coordinate)
    sends, receives = step.sends(place.coordinate), step.receives(place.coordinate)
    sent, received = ([piece for piece in pieces if piece.member != own] for pieces in (sends, receives))
    if not sent or not received or len(received) == len(receives):
        return None
    (kept,) = [piece.box for piece in sends if piece.member == own]
    exchanged = splits(sent, group), splits(received, group)
    pack, exchange = pack_pieces(sent, group), swap(*exchanged, group, finish)
    land = landing(step, receives, exchanged[1], group, place.wanted.length, own)
    return lambda local: Apart(pack(local), part(local, kept), exchange, land)
