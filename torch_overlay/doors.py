"""What the overlay needs besides bodies, and upstream wouldn't: trampolines for swapped code, and hooks.

A swapped code object runs with torch's globals, so a trampoline looks its body up in our module at each call.
"""

import os
from typing import Any


def init_device_mesh(device_type, mesh_shape, *, mesh_dim_names=None, backend_override=None):  # type: ignore[no-untyped-def]
    """Reaches every ``from torch.distributed import init_device_mesh`` that was run before enable()."""
    from torch_overlay.distributed.device_mesh import init_device_mesh as body

    return body(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, backend_override=backend_override)


def redistribute_local_tensor(local_tensor, current_spec, target_spec, **options):  # type: ignore[no-untyped-def]
    """Reaches the modules, torch's and other people's, that hold the function by name."""
    from torch_overlay.distributed.tensor._redistribute import redistribute_local_tensor as body

    return body(local_tensor, current_spec, target_spec, **options)


def redistribute_cost(current_spec, target_spec):  # type: ignore[no-untyped-def]
    """What sharding propagation asks; held by name in several modules."""
    from torch_overlay.distributed.tensor._collective_utils import redistribute_cost as body

    return body(current_spec, target_spec)


def meshes_need_nothing() -> None:
    """Meshes that torch made get their state on first use."""


def hand_back_meshes(_: None) -> None:
    """Meshes made under the overlay go on living without it."""
    from torch_overlay.distributed._mesh_state import hand_back

    hand_back()


def forget_shardings(_: None = None) -> None:
    """Forget, in this thread, the specs that operations gave: torch keeps them with their meshes, so that results on an
    equal mesh that is made later would lie on the first one and have its groups."""
    from torch import _C
    from torch.distributed.tensor._api import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    _C._clear_DTensor_sharding_propagator_cache()


def trace_as_torch() -> tuple[list[str], dict[str, Any]]:
    """Dynamo goes by files: ours get what ``torch/distributed`` has, not traced by itself, inlined when called.

    Its lists are made anew after every init_process_group, so the functions that make them are replaced.
    """
    from torch._dynamo import trace_rules  # imported already: the row waits for it

    here = os.path.dirname(__file__)
    files = [path.replace(os.sep, "/") for path in (os.path.join(here, "distributed", ""), __file__)]
    lists = {name: getattr(trace_rules, name) for name in ("get_mod_inlinelist", "get_mod_skiplist")}
    for name, torchs in lists.items():
        setattr(trace_rules, name, _with(files, torchs))
    return files, lists


def _with(files: list[str], torchs: Any) -> Any:
    def files_and_torchs() -> set[str]:
        known = torchs()
        known.update(files)
        return known

    files_and_torchs.cache_clear = torchs.cache_clear  # type: ignore[attr-defined]
    return files_and_torchs


def trace_as_user_code(traced: tuple[list[str], dict[str, Any]]) -> None:
    """Take it back."""
    from torch._dynamo import trace_rules

    files, lists = traced
    for name, torchs in lists.items():
        torchs().difference_update(files)
        setattr(trace_rules, name, torchs)
