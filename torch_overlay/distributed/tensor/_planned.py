"""Plans of redistributions, made once for each question and kept ready to run on this rank.

What can't be planned: symbolic shapes, uneven strided shards, other Partial classes, modes that stand for many ranks at
once. `find_plan` then says why.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import is_initialized
from torch.distributed.tensor import _redistribute as torch_redistribute

from .._group_table import find_group as resolve
from .._mesh_groups import joint_groups_known
from .._mesh_state import shared_state, view_of
from .._settings import get_settings
from .._shared_state import states
from ._joint_groups import Group, find_group, gone
from ._pair import Pair
from ._planner.cost import collectives
from ._planner.plan import line, plan
from ._planner.regions import NotOurs, Regions
from ._planner.steps import Collective, Narrow, Step
from ._run import Local, runners

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Sequence

    from torch.distributed.tensor._dtensor_spec import DTensorSpec

CACHED_PLANS = 4096
SYMBOLIC = "a symbolic shape"
_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor}
# Where torch has the switch `compile_on_one_rank`: with the compiler's from 2.14 on.
_ONE_RANK = torch.compiler.config if hasattr(torch.compiler.config, "compile_on_one_rank") else torch.distributed.config


class Planned(NamedTuple):
    """A plan, made to run on this rank.

    Attributes:
        steps: the plan; `run` has a function for each.
        held: the shape that the local tensor must have.
        ends: what each coordinate holds before and after.
        itemsize: the bytes of an element.
        names: of the mesh's axes.
        groups: by name, the axes that each serves.
        runs: how often it ran, the only item.
        pair: what it was made from.
        trim: whether the last step leaves a view of something bigger, or torch a copy where there is nothing to do.
        aliases: whether that is the local tensor itself.
    """

    steps: tuple[Step, ...]
    run: tuple[Local, ...]
    held: tuple[int, ...]
    ends: tuple[Regions, Regions]
    itemsize: int
    names: tuple[str, ...] | None
    groups: dict[str, tuple[int, ...]]
    runs: list[int]
    pair: Pair
    trim: bool
    aliases: bool

    @property
    def text(self) -> str:
        """The plan as one line."""
        return line(*self.ends, self.steps, self.itemsize, self.names)


_counted: Counter[str] = Counter()


def counters() -> dict[str, object]:
    """What was redistributed in this process, and how."""
    fallbacks = {name.removeprefix("torch: "): n for name, n in sorted(_counted.items()) if name.startswith("torch: ")}
    return {
        "redistributions by plan": _counted["planned"],
        "plans made": _counted["made"],
        "plans in the cache": sum(len(shared.remembered["plans"]) for shared in list(states)),
        "collectives that more groups would save": missing_groups(),
        "redistributions by torch's own code": fallbacks,
    }


def missing_groups() -> dict[str, int]:
    """The calls that would make groups which plans lacked, with the collectives that each would have saved so far."""
    found: Counter[str] = Counter()
    plans = [made for shared in list(states) for made in list(shared.remembered["plans"].values())]
    for made in [made for made in plans if not isinstance(made, str) and collectives(made.steps) > 1]:
        before, after = made.ends
        best = plan(before, after, made.itemsize, cost=made.pair.cost)
        wanted = [step.axes for step in best if isinstance(step, Collective) and len(step.axes) > 1]
        lacked = dict.fromkeys(axes for axes in wanted if axes not in made.pair.joint)
        saved = (collectives(made.steps) - collectives(best)) * made.runs[0]
        if saved > 0 and lacked:
            found[" and ".join(_call(axes, made.names) for axes in lacked)] += saved
    return dict(found.most_common())


def _call(axes: tuple[int, ...], names: tuple[str, ...] | None) -> str:
    """The mesh call that makes a group over some axes."""
    if not names:
        return f"a group over axes {axes} of a mesh without names"
    chosen = [str(names[axis]) for axis in axes]
    return f"mesh[{', '.join(map(repr, chosen))}].flatten({'_'.join(chosen)!r})".replace("'", '"')


def forget_plans(_: None = None) -> None:
    """Forget what redistributions found out about all meshes."""
    for shared in list(states):
        shared.remembered.clear()


def count_fallback(reason: str) -> None:
    """Count a redistribution that torch's own code does."""
    _counted[f"torch: {_kind(reason)}"] += 1


def _kind(reason: str) -> str:
    """A reason without what differs from case to case, so that there are few to count."""
    return re.sub(r" of DeviceMesh\(.*|\(.*?\)|\d+", "…", reason)


def run_plan(found: Planned, local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What this rank holds after the steps, from what it held before.

    Raises:
        RuntimeError: a collective failed; if its group was destroyed, says which.
    """
    _counted["planned"] += 1
    found.runs[0] += 1
    result = local
    try:
        for run in found.run:
            result = run(result)
    except RuntimeError as error:
        missing = [axes for name, axes in found.groups.items() if resolve(name) is None]
        if missing:
            raise RuntimeError(gone(mesh, missing[0])) from error
        raise
    if not found.trim:
        return result
    return result.clone() if found.aliases else result.contiguous()


def find_plan(
    mesh: DeviceMesh,
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
    forced: bool | None,
) -> Planned | str:
    """The plan, from the cache or made now; or why there is none."""
    eager = type(local) is torch.Tensor and not torch._C._len_torch_dispatch_stack()
    why = _not_planned(mesh, source, target, forced) or (None if eager else _not_run(local, source, target))
    if why is not None:
        return why
    plans, view = shared_state(mesh).remembered["plans"], view_of(mesh)
    known = joint_groups_known(mesh)
    shape = source.shape
    if not eager and _is_symbolic(shape):
        shape = (math.prod(mesh.shape),) * len(shape)  # any would do, see `_not_run`
    asked = (  # and no mesh: groups that are destroyed go with it
        view,
        mesh._mesh_dim_names,
        mesh._coordinate_on_dim,
        tuple(mesh._dim_group_names),
        source.placements,
        target.placements,
        tuple(map(type, (*source.placements, *target.placements))),  # a subclass may call itself equal
        source.shard_order,
        target.shard_order,
        len(shape),
        known,
        get_settings(),
    )
    key = (asked, shape, local.dtype, async_op)
    found = plans.get(key)
    if found is None:
        found = _make(asked, mesh, source, target, tuple(shape), local.dtype, async_op)
        _counted["made"] += 1
        plans[key] = found
    with contextlib.suppress(KeyError):  # threads that meet here plan twice, and one may drop what another found
        if len(plans) > CACHED_PLANS // 2:
            plans.move_to_end(key)  # before, nobody asks which one is the oldest soon
        if len(plans) > CACHED_PLANS:
            plans.popitem(last=False)
    if not isinstance(found, str) and shape is source.shape and tuple(local.shape) != found.held:
        return _misfit(found, local, source)
    return found


def _misfit(found: Planned, local: torch.Tensor, source: DTensorSpec) -> str:
    """Why torch's own code runs; where others would wait for this rank by a plan that it can't follow, an error."""
    if collectives(found.steps):
        raise ValueError(
            f"A local tensor of shape {found.held} is expected at {source.mesh._coordinate_on_dim} of a mesh of shape "
            f"{tuple(source.mesh.shape)}, since the DTensor has shape {tuple(source.shape)} and placements "
            f"{source.placements}; it has shape {tuple(local.shape)}. Nothing was sent. Give DTensor.from_local the "
            "true global shape= and stride=, or the local tensor that they ask for."
        )
    return "a local tensor of another shape than its spec says"


def _not_run(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> str | None:
    """Why a plan can't run on this tensor, now; a class may only know the operations that torch's own steps take.

    What only ends reductions is one plan for all sizes, known or not: ranks that compiled for other sizes run the same.
    """
    inner = local.elem if isinstance(local, AsyncCollectiveTensor) else local
    why = _not_traced(source)
    if why == SYMBOLIC and _only_reduces(source, target):
        why = None
    return why or (None if type(inner) in _PLAIN else "a local tensor of a class of its own")


def _only_reduces(source: DTensorSpec, target: DTensorSpec) -> bool:
    ends = zip(source.placements, target.placements, strict=True)
    same_order = source.shard_order == target.shard_order
    return same_order and all(old == new or (old.is_partial() and new.is_replicate()) for old, new in ends)


def _is_symbolic(shape: Sequence[object]) -> bool:
    return bool({*map(type, shape)} - {int})


def not_ours(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> str | None:
    """Why there is no plan, whatever the tensor; None if `Pair.of` may be asked."""
    return _not_planned(mesh, source, target) or _not_traced(source)


def _not_planned(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec, forced: bool | None = None) -> str | None:
    """What the cache's key can't hold."""
    if forced or torch_redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN:
        return "torch's graph search was asked for"
    if torch_redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION:
        return "torch's steps were asked for, unmerged"
    if type(mesh) is not DeviceMesh or "_dim_group_names" not in mesh.__dict__:
        return "a mesh that isn't DeviceMesh's own, or has no groups"
    if not is_initialized():
        return "no world"
    if source.mesh is not target.mesh and source.mesh != target.mesh:
        return "another mesh"
    if mesh._coordinate_on_dim is None:
        return "this rank isn't in the mesh"
    return None


def _not_traced(source: DTensorSpec) -> str | None:
    """What stands in the way only under a mode of torch's dispatch, one that traces, say."""
    if _stands_for_many_ranks():
        return "a mode in which one process stands for many ranks"
    if _is_symbolic(source.shape):
        return SYMBOLIC
    return None


def _stands_for_many_ranks() -> bool:
    if getattr(_ONE_RANK, "compile_on_one_rank", False):
        return True
    local_tensor = sys.modules.get("torch.distributed._local_tensor")
    return local_tensor is not None and local_tensor.enabled_local_tensor_mode() is not None


def _make(
    asked: Any,
    mesh: DeviceMesh,
    source: DTensorSpec,
    target: DTensorSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    async_op: bool,
) -> Planned | str:
    coordinate = mesh._coordinate_on_dim
    groups: dict[tuple[int, ...], Group] = {}

    def group_of(axes: tuple[int, ...]) -> Group:
        groups[axes] = find_group(mesh, axes, mesh._rank)
        return groups[axes]

    try:
        pairs = shared_state(mesh).remembered["pairs"]
        pair = pairs.get(asked) or _remember(pairs, asked, Pair.of(mesh, source, target))
        before, after, steps = pair.plan(shape, dtype)
        held = before.box(coordinate)
        run = runners(steps, coordinate, held, group_of, async_op)
    except NotOurs as error:
        return str(error)
    if pair.norm is not None:
        run = (pair.norm._pre_reduce_transform, *run, pair.norm._post_reduce_transform)
    trim = isinstance(steps[-1], Narrow) if steps else pair.copies
    used = {group.name: axes for axes, group in groups.items()}
    aliases = {*map(type, steps)} <= {Narrow}
    ends = before, after
    return Planned(steps, run, held.length, ends, dtype.itemsize, mesh.mesh_dim_names, used, [0], pair, trim, aliases)


def _remember(pairs: OrderedDict[Any, Pair], asked: Any, pair: Pair) -> Pair:
    if len(pairs) >= CACHED_PLANS:
        pairs.clear()
    pairs[asked] = pair
    return pair
