"""Before plans are compared with the step-by-step path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._group_table import find_group
from ._joint_groups import gone
from ._run import runners

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._joint_groups import Group


class Program(...):
    """The answer to a question: what to run.

    Attributes:
        question: to which it is the answer.
        held: what this rank holds before, whose shape the local tensor must have.
        before, after: what each coordinate holds.
        steps: the plan.
        at_hand: the groups of the mesh.
        norm: what the redistribution brings together, if it is the terms of a norm.
        functions: what runs, one after the other; None until it is made ready.
        groups: by name, the axes that each group serves that the functions use.
    """

    in_order = ...
    same_step_by_step = ...

    def make_ready(self, mesh: DeviceMesh) -> None:
        """Look up the groups and make the functions.

        Raises:
            RuntimeError: a group was destroyed.
            NotPlanned: a group holds other ranks than the mesh says.
        """
        used: dict[tuple[int, ...], Group] = {}

        def group_of(axes: tuple[int, ...]) -> Group:
            used[axes] = self.at_hand.find(mesh, axes)
            return used[axes]

        ask, coordinate = self.question, self.question.site.coordinate
        functions = runners(self.steps, coordinate, self.held, group_of, ask.async_op)
        if self.norm is not None:
            functions = (self.norm._pre_reduce_transform, *functions, self.norm._post_reduce_transform)
        self.groups = {group.name: axes for axes, group in used.items()}
        self.functions = functions

    def run(self, local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """What this rank holds after the plan, from what it held before.

        Raises:
            RuntimeError: a collective failed; if its group was destroyed, says which.
        """
        if self.functions is None:
            raise AssertionError("a program runs after make_ready")
        result = local
        try:
            for function in self.functions:
                result = function(result)
        except RuntimeError as error:
            missing = [axes for name, axes in self.groups.items() if find_group(name) is None]
            if missing:
                raise RuntimeError(gone(mesh, missing[0])) from error
            raise
        return result
