"""Make a `Transfer`: its ranks agree, make a process group, and plan all tensors. Start at `make`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..distributed._mesh.text import of_ranks
from ..errors import TransferFailed
from ..rendezvous.group import TransferGroup, meeting_of
from ._planner.memory import NOTHING_SHARED
from .agreement import agree
from .blocks import Buffers
from .bound_tensors import bind_side, locals_of
from .descriptions import SIDES
from .replicas import check_tied_entries
from .run import TransferState, shared_by
from .source_values import check_tied_targets
from .transfer_plan import Plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..rendezvous.meeting import Meeting
    from .agreement import Group
    from .options import Options
    from .stages import Stages
    from .trees import Names


def make(
    source: Any,
    target: Any,
    group: Group,
    names: Names,
    gone: Sequence[int],
    options: Options,
    stages: Stages | None,
) -> TransferState:
    """Make a Transfer on this rank. Collective over `group`."""
    agreement, meeting, given = agree(source, target, group, names, gone, options, stages)
    sides = [bind_side(side, tensors, agreement.moves, agreement.place, stages) for side, tensors in zip(SIDES, given)]
    device = torch.device(agreement.device_type)
    # Its tensors may be on several devices of this type: their buffers are on the first one's.
    devices = [tensor.device for tensor in (*sides[0], *sides[1]) if tensor is not None]
    devices += [] if stages is None else [stages.device]
    device = next((each for each in devices if each.type == device.type), device)
    transfer = TransferState(agreement, options, sides[0], sides[1], device, stages)
    if agreement.tied:
        _check_tied(transfer, group)
    if agreement.tensors:
        _make_group_and_plan(transfer, meeting)
    return transfer


def _check_tied(transfer: TransferState, group: Group) -> None:
    """Check that targets which are one block of memory get equal values. Collective, unless the source is a
    checkpoint."""
    agreement = transfer.agreement
    if agreement.contents is not None:
        check_tied_entries(agreement.tied, agreement.tensors, agreement.contents)
        return
    locals_, _ = locals_of(transfer.sources, agreement.own)
    meeting = meeting_of(group, agreement.gone)
    check_tied_targets(meeting, agreement, transfer.sources, locals_)


def _make_group_and_plan(transfer: TransferState, meeting: Meeting) -> None:
    """Make the process group and the plan of all tensors. Collective. A rank outside both sides only helps to make the
    group, where the backend needs all ranks of the world for it."""
    agreement, ranks = transfer.agreement, transfer.ranks
    group = TransferGroup(agreement.place, ranks, transfer.device, agreement.device_type)
    if meeting.rank not in ranks:
        group.make(meeting)  # on a backend where the whole world has to take part
        return
    group.start_watch(meeting)
    try:
        group.enter("making the process group", True)
        group.make(meeting)
        group.team.connect()
        group.enter("planning", False)
        indices = agreement.own
        sources, source_problems = locals_of(transfer.sources, indices)
        targets, target_problems = locals_of(transfer.targets, indices)
        has_problems = bool(source_problems or target_problems)  # of which the first run tells
        shared = NOTHING_SHARED if has_problems else shared_by(transfer, None, indices, sources, targets)
        transfer.group, transfer.buffers = group, Buffers(transfer.device)
        transfer.plans = Plans(agreement, group, transfer.buffers, transfer.options.changes, transfer.stages)
        transfer.plans.add(None, indices, sources, shared)
        group.end_run()
    except RuntimeError as error:
        if group.watch is None:
            raise
        watch = group.watch
        said = watch.settle(error, is_own=False)
        group.end_watch()
        said = f"A Transfer over {of_ranks(ranks)} can't be made: {said}"
        raise TransferFailed(said, watch.gone, failed=watch.failed) from error
    except Exception:  # as all ranks raise it
        group.end_watch()
        raise
    except BaseException as error:
        group.tell_interrupt(error)
        group.end_watch()
        raise
