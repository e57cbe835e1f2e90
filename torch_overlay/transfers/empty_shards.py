"""Norms that have no value of an empty shard: those of an infinite order, or of one below 0.

DTensor takes the norm of each rank's shard, and reduces over the ranks after. 2 rows over 4 ranks leave two ranks with
nothing, where torch's operator raises, and the other ranks wait for these in the all-reduce. Such a tensor is made
whole along the dims that are reduced, before the operator runs: it is small beside the mesh. That is decided by the
whole shape, so all ranks do the same. Compiled code does it, too, since the rule for shardings says it.

`norms.py` needs no such move for gradients, where one element that changes nothing stands for an empty shard.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..distributed._mesh.caches import forget_shardings

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Rule = Callable[[Any], Any]

aten = torch.ops.aten
NORMS = (aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar)


class Replaced(NamedTuple):
    """One of torch's rules, and the table of the propagator in which it was."""

    table: dict[Any, Any]
    norm: Any
    rule: Any


def make_whole() -> list[Replaced]:
    """Put our rules in the place of torch's, of which 2.14 has others. Where a release has neither, nothing changes."""
    from torch.distributed.tensor._api import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    replaced = []
    for name, over in (("op_strategy_funcs", _over), ("op_single_dim_strategy_funcs", _filtered)):
        table = getattr(propagator, name, {})
        for norm in NORMS:
            ours = over(table[norm]) if norm in table else None
            if ours is not None:
                replaced.append(Replaced(table, norm, table[norm]))
                table[norm] = ours
    forget_shardings()  # they hold what torch's rules said
    return replaced


def leave_cut(replaced: list[Replaced]) -> None:
    """Take them back."""
    for table, norm, rule in replaced:
        table[norm] = rule
    forget_shardings()


def _has_no_value_of_nothing(schema: Any) -> bool:
    """Whether this norm is of an order for which an empty tensor has none; else it is 0, and adds nothing."""
    order = schema.args_schema[1] if len(schema.args_schema) > 1 else 2
    return not 0 <= float(order) < math.inf


def _filtered(info: Any) -> Any:
    """Since 2.14 a rule lists what may be done along one axis, and a filter looks at what comes of it on all axes."""
    if not hasattr(info, "full_mesh_strategy_filter"):
        return None
    torchs = info.full_mesh_strategy_filter

    def leaves_none_empty(mesh: Any, schema: Any, inputs: Sequence[DTensorSpec], outputs: Any) -> bool:
        if torchs is not None and not torchs(mesh, schema, inputs, outputs):
            return False
        if not _has_no_value_of_nothing(schema):
            return True
        shape = schema.args_schema[0].shape
        return not any(leaves_some_empty(inputs[0], dim, shape[dim]) for dim in _reduced(schema, len(shape)))

    return dataclasses.replace(info, full_mesh_strategy_filter=leaves_none_empty)


def _over(rule: Rule) -> Rule:
    @functools.wraps(rule)
    def norm_rule(schema: Any) -> Any:
        return rule(_as_whole(schema) if _has_no_value_of_nothing(schema) else schema)

    return norm_rule


def _reduced(schema: Any, ndim: int) -> set[int]:
    """The dims over which a norm goes; all where none is given, or an empty list, as torch takes it."""
    given = schema.args_schema[2] if len(schema.args_schema) > 2 else None
    dims = [given] if isinstance(given, int) else given or range(ndim)
    return {dim % ndim for dim in dims}


def _as_whole(schema: Any) -> Any:
    """The same question, as if each tensor were whole along the reduced dims of which a rank has nothing."""
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy

    def whole(strategy: Any) -> Any:
        if isinstance(strategy, TupleStrategy):
            return TupleStrategy([whole(one) for one in strategy.children])
        specs = [(one, _whole_spec(one.output_spec, schema)) for one in strategy.strategies]
        if all(spec is one.output_spec for one, spec in specs):
            return strategy
        return OpStrategy([OpSpec(spec) for _, spec in specs])

    first, *others = schema.args_schema
    return OpSchema(schema.op, (whole(first), *others), schema.kwargs_schema, schema.schema_info)


def _whole_spec(spec: DTensorSpec, schema: Any) -> DTensorSpec:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Replicate

    shape = spec.shape
    empty = {dim for dim in _reduced(schema, len(shape)) if leaves_some_empty(spec, dim, shape[dim])}
    if not empty:
        return spec
    placements = [Replicate() if getattr(held, "dim", None) in empty else held for held in spec.placements]
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def leaves_some_empty(spec: DTensorSpec, dim: int, length: Any) -> bool:
    """Whether some rank may have nothing along a dim of this length, of which others have something."""
    from torch.distributed.tensor.placement_types import Shard
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    sizes, parts = [], 1
    for axis, held in enumerate(spec.placements):
        if getattr(held, "dim", None) == dim and not held.is_partial():
            sizes.append(spec.mesh.size(axis) if type(held) is Shard else 0)
            parts *= spec.mesh.size(axis)
    if guard_or_false(length % parts == 0):
        return False
    in_order = spec.is_default_device_order(spec.shard_order) and all(sizes)
    if not isinstance(length, int) or not in_order:
        return True  # of an open size, or of strided shards, that isn't worth knowing: whole is right, too
    lengths = {length}
    for size in sizes:
        lengths = set().union(*(_chunks(some, size) for some in lengths))
    return 0 in lengths


def _chunks(length: int, size: int) -> set[int]:
    """The lengths of the chunks into which torch.chunk cuts for so many ranks, 0 among them if a rank gets none."""
    if not length:
        return {0}
    full = -(-length // size)
    count = -(-length // full)
    return {full, length - full * (count - 1)} | ({0} if count < size else set())
