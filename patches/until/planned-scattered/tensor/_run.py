"""Before reduce-scatters run."""

from __future__ import annotations

from ._pack import Stages
from ._planner.steps import AllGather, AllReduce, AllToAll

_reduce_scatter = ...
_pack_padded = ...
_COLLECTIVES: dict[type, Callable[..., Stages]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    AllToAll: _all_to_all,
}
