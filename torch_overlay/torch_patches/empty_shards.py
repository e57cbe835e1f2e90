"""Norms of an infinite order, or of one below 0, where some rank has an empty shard.

DTensor takes the norm of each rank's shard, and reduces over the ranks after that. 2 rows on 4 ranks leave two ranks
with empty shards, on which torch's operator raises, while the other ranks wait for them in the all-reduce. Here such a
tensor is gathered along the dims that are reduced before the operator runs; it has fewer rows than there are ranks.
That follows from the whole shape, so all ranks do the same. It is a rule of DTensor's sharding propagation, so compiled
code does it, too.

`norms.py` needs no gathering for gradients: there, one element that changes nothing stands for an empty shard.
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
    """A rule of torch's that was replaced.

    Attributes:
        table: the propagator's table in which it was.
        norm: its key there, an operator.
        rule: torch's.
    """

    table: dict[Any, Any]
    norm: Any
    rule: Any


def install_whole_norms() -> list[Replaced]:
    """Replace torch's rules for norms, of another kind from 2.14 on, and empty DTensor's caches of what they said."""
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
    forget_shardings()  # the caches hold what torch's rules said
    return replaced


def uninstall_whole_norms(replaced: list[Replaced]) -> None:
    """Put torch's rules back, as `install_whole_norms` returned them, and empty DTensor's caches of what ours said."""
    for table, norm, rule in replaced:
        table[norm] = rule
    forget_shardings()


def _has_no_value_of_nothing(schema: Any) -> bool:
    """True if the order of this norm makes the norm of an empty tensor an error."""
    order = schema.args_schema[1] if len(schema.args_schema) > 1 else 2
    return not 0 <= float(order) < math.inf


def _filtered(info: Any) -> Any:
    """Return a rule of 2.14's kind that also refuses shardings with empty shards; None if `info` is of another kind."""
    if not hasattr(info, "full_mesh_strategy_filter"):
        return None
    torchs = info.full_mesh_strategy_filter

    def leaves_none_empty(mesh: Any, schema: Any, inputs: Sequence[DTensorSpec], outputs: Any) -> bool:
        """True if torch's filter allows a sharding, and no rank would have an empty shard of a reduced dim."""
        if torchs is not None and not torchs(mesh, schema, inputs, outputs):
            return False
        if not _has_no_value_of_nothing(schema):
            return True
        shape = schema.args_schema[0].shape
        return not any(leaves_some_empty(inputs[0], dim, shape[dim]) for dim in _reduced(schema, len(shape)))

    return dataclasses.replace(info, full_mesh_strategy_filter=leaves_none_empty)


def _over(rule: Rule) -> Rule:
    """Return a rule that asks torch's rule as if tensors with empty shards were whole."""

    @functools.wraps(rule)
    def norm_rule(schema: Any) -> Any:
        """Do what torch's rule does, for whole tensors in place of those with empty shards."""
        return rule(_as_whole(schema) if _has_no_value_of_nothing(schema) else schema)

    return norm_rule


def _reduced(schema: Any, ndim: int) -> set[int]:
    """Return the dims that a norm reduces; all of them if none is given, or an empty list."""
    given = schema.args_schema[2] if len(schema.args_schema) > 2 else None
    dims = [given] if isinstance(given, int) else given or range(ndim)
    return {dim % ndim for dim in dims}


def _as_whole(schema: Any) -> Any:
    """Return the schema as if each tensor were whole along the reduced dims in which some rank has an empty shard."""
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy

    def whole(strategy: Any) -> Any:
        """Return the strategy of one argument with whole tensors in place of those with empty shards."""
        if isinstance(strategy, TupleStrategy):
            return TupleStrategy([whole(child) for child in strategy.children])
        specs = [(option, _whole_spec(option.output_spec, schema)) for option in strategy.strategies]
        if all(spec is option.output_spec for option, spec in specs):
            return strategy
        return OpStrategy([OpSpec(spec) for _, spec in specs])

    first, *others = schema.args_schema
    return OpSchema(schema.op, (whole(first), *others), schema.kwargs_schema, schema.schema_info)


def _whole_spec(spec: DTensorSpec, schema: Any) -> DTensorSpec:
    """Return a spec that replicates where `spec` leaves a rank with an empty shard of a reduced dim; else `spec`."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Replicate

    shape = spec.shape
    empty = {dim for dim in _reduced(schema, len(shape)) if leaves_some_empty(spec, dim, shape[dim])}
    if not empty:
        return spec
    placements = [Replicate() if getattr(held, "dim", None) in empty else held for held in spec.placements]
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def leaves_some_empty(spec: DTensorSpec, dim: int, length: Any) -> bool:
    """True if some rank may have an empty shard along a dim of this length while others have elements. What isn't known
    (a symbolic length, strided shards, another order of axes) counts unless the cut is even."""
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
        # With a symbolic size, or strided shards, it isn't worth computing: gathering is right in every case.
        return True
    lengths = {length}
    for size in sizes:
        lengths = set().union(*(_chunks(part, size) for part in lengths))
    return 0 in lengths


def _chunks(length: int, size: int) -> set[int]:
    """Return the lengths of the chunks of `torch.chunk` for `size` ranks, 0 among them if some rank gets none."""
    if not length:
        return {0}
    full = -(-length // size)
    count = -(-length // full)
    return {full, length - full * (count - 1)} | ({0} if count < size else set())
