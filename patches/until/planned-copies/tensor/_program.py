"""Before a result is a tensor of its own where the step-by-step path makes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._run import runners

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._joint_groups import Group


class Program(...):
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
        self.in_order = all(group.in_order for group in used.values())
        self.functions = functions

    _last_copy = ...


_copied = ...
