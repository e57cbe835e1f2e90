"""What it takes to plan from one spec to another on a mesh, found out once for tensors of all sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._settings import Settings, get_settings
from ._joint_groups import joint_axes
from ._planner.cost import Cost
from ._planner.plan import plan
from ._planner.regions import NotOurs
from ._planner.steps import AllToAll
from ._run import reduces
from ._specs import nest_anew, norm_ended, read_cuts

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    from ._planner.regions import Cuts, Regions
    from ._planner.steps import Step

_COST = Cost()


class Pair(NamedTuple):
    """Two specs, whatever the sizes of the tensor, on a mesh with the groups that are at hand.

    Attributes:
        before, after: what the placements say.
        sizes: of the mesh, by axis.
        norm: what the redistribution brings together, if it is the terms of a norm.
        joint: the sets of axes for which there is a group.
        cost: the cost model, with what the user said of the mesh's axes.
        copies: whether a result is no view of the local tensor, even where nothing is to be done.
    """

    before: Cuts
    after: Cuts
    sizes: tuple[int, ...]
    norm: _NormPartial | None
    joint: frozenset[tuple[int, ...]]
    cost: Cost
    copies: bool

    @staticmethod
    def of(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> Pair:
        """Raises NotOurs, with the reason."""
        sizes, ndim = tuple(mesh.shape), len(source.shape)
        before, after = [read_cuts(spec, ndim, sizes) for spec in (source, target)]
        norm = norm_ended(source, target)
        copies = 1 in sizes and nest_anew(source, target, sizes)
        return Pair(before, after, sizes, norm, joint_axes(mesh), _cost_of(mesh, get_settings()), copies)

    def plan(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Regions, Regions, tuple[Step, ...]]:
        """What each coordinate holds before and after, and the steps between. Raises NotOurs, with the reason."""
        before, after = self.before.on(shape, self.sizes), self.after.on(shape, self.sizes)
        steps = plan(before, after, dtype.itemsize, self.joint, self.cost)
        for step in steps:
            if isinstance(step, AllToAll) and step.reduced and not reduces(step.op, dtype):
                raise NotOurs("terms of a type that only a backend reduces")
        return before, after, steps


def _cost_of(mesh: DeviceMesh, settings: Settings) -> Cost:
    if not settings.topology or not mesh.mesh_dim_names:
        return _COST
    known = {name: (latency, bandwidth) for name, bandwidth, latency in settings.topology}
    default = (_COST.latency, _COST.bandwidth)
    return Cost(axes=tuple(known.get(name, default) for name in mesh.mesh_dim_names))
