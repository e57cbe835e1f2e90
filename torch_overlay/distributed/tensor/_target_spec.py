"""The spec in which a redistribution ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor.placement_types import Placement

_KNOWN = frozenset((Shard, Replicate, Partial, _StridedShard))


def is_known(kinds: Iterable[type]) -> bool:
    """Whether placements of these classes are what they say: of another class, equal ones may differ."""
    return _KNOWN.issuperset(kinds)


def other_spec(
    meta: TensorMeta | None,
    source: tuple[Placement, ...],
    target: Sequence[Placement],
    kinds: tuple[type, ...],
    mesh: DeviceMesh,
) -> DTensorSpec | None:
    """What a tensor is to become, of known placements; None where it is that already.

    What follows from the placements is computed once for a mesh; each call makes a new spec, which the caller may
    change.
    """
    target = tuple(target)
    if source == target and kinds[: len(target)] == kinds[len(target) :]:
        return None
    shared = mesh.__dict__.get("_shared_state")
    specs = shared.remembered.specs if shared is not None else {}
    key = (target, kinds, mesh.__dict__.get("_view"))
    made = specs.get(key)
    if made is None:
        if len(specs) >= 1024:
            specs.clear()
        made = specs[key] = dict(DTensorSpec(mesh, target).__dict__)
        del made["mesh"]  # else the spec would keep it
    spec = object.__new__(DTensorSpec)
    # The caller's own mesh and meta, never an equal mesh's.
    spec.__dict__.update(made, mesh=mesh, tensor_meta=meta)
    return spec
