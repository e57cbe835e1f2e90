"""Runs the steps of a plan by value, all-to-alls among them."""

from step_simulator import MOVED, SIZES, cut, filled, is_right, pairs, pieces_sent, reduce, regions, run
from torch_overlay.distributed.tensor._planner.steps import AllToAll

__all__ = ["MOVED", "SIZES", "is_right", "pairs", "regions"]


@run.register
def _(step: AllToAll, held):
    done, sent = filled(step.after), pieces_sent(step, held, step.sends)
    for place, local in done.items():
        for piece in step.receives(place):
            part, came = cut(local, piece.box), sent[step.members(place)[piece.member], place]
            part.copy_(reduce(step.op, [part, came]) if piece.add else came)
    return done
