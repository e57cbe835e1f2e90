"""What the plan of a redistribution costs, for sharding propagation, which asks the same over and over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor.placement_types import Shard, _StridedShard

from .._mesh_caches import real_mesh
from ._answers import remembered, why_not_planned
from ._program import Program
from ._question import Question

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def planned_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float | None:
    """Microseconds on the wire of the plan that will run; None where the step-by-step path will, and where shards
    become terms: whether an operator may have that isn't a question of time."""
    if current_spec.tensor_meta is None:
        return None
    ends = zip(current_spec.placements, target_spec.placements)
    if any(isinstance(old, (Shard, _StridedShard)) and new.is_partial() for old, new in ends):
        return None
    mesh = real_mesh(current_spec.mesh)
    if why_not_planned(mesh, current_spec, target_spec) is not None:
        return None
    dtype = current_spec.tensor_meta.dtype
    question = Question.of(mesh, current_spec, target_spec, tuple(current_spec.shape), dtype)
    found = remembered(question, mesh, ready=False)
    if not isinstance(found, Program):
        return None
    return 1e6 * sum(found.cost.seconds(step, dtype.itemsize) for step in found.steps)
