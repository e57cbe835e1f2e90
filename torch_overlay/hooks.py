"""What enable() and disable() do besides putting bodies in place: states, caches and lists that torch keeps."""

import os
from typing import Any


def meshes_need_nothing() -> None:
    """Meshes that torch made get their state on first use."""


def hand_back_meshes(_: None) -> None:
    """Meshes made under the overlay go on living without it."""
    from torch_overlay.distributed._mesh.state import hand_back

    hand_back()


def trace_as_torch() -> tuple[list[str], dict[str, Any]]:
    """Dynamo goes by files: ours get what ``torch/distributed`` has, not traced by itself, inlined when called.

    Its lists are made anew after every init_process_group, so the functions that make them are replaced.
    """
    from torch._dynamo import trace_rules  # imported already: the row waits for it

    here = os.path.dirname(__file__)
    files = [os.path.join(here, name, "").replace(os.sep, "/") for name in ("distributed", "compat")]
    lists = {name: getattr(trace_rules, name) for name in ("get_mod_inlinelist", "get_mod_skiplist")}
    for name, torchs in lists.items():
        setattr(trace_rules, name, _with(files, torchs))
    return files, lists


# Members of a mesh that compiled code may call: read by dynamo, or run once, when the code is compiled.
_READ = ("permute", "submesh_at", "flatten", "unflatten", "concatenate", "_beside")
_RUN = ("_trace_view", "_traced_views")


def trace_views() -> tuple[dict[str, Any], Any, Any]:
    """Register the methods that give views with dynamo, which refuses any member of a mesh that it doesn't know, and
    let it compare all that makes two meshes unequal, and their groups, before it runs code of one with the other."""
    from torch.distributed.device_mesh import DeviceMesh

    from torch_overlay.distributed._mesh.caches import compiled_group_key
    from torch_overlay.distributed._mesh.state import private_group_key
    from torch_overlay.distributed._mesh.universe import making_private

    try:
        from torch._library.opaque_object import _OPAQUE_TYPES as known
    except ImportError:  # before 2.12 dynamo knows meshes in another way, and breaks the graph
        known = {}
    info = known.get(DeviceMesh)
    members = getattr(info, "members", None) or {}
    kinds = {name: members.get(like) for names, like in ((_READ, "_flatten"), (_RUN, "size")) for name in names}
    added = {name: kind for name, kind in kinds.items() if kind is not None and name not in members}
    members.update(added)
    torchs: Any = getattr(info, "guard_fn", None)

    def compared(mesh: DeviceMesh) -> list[Any]:
        whose = (*private_group_key(mesh), *compiled_group_key(mesh), making_private.get())
        return [*torchs(mesh), mesh._preserve_rank_order, *whose]

    if info is not None and torchs is not None:
        info.guard_fn = compared
    return dict.fromkeys(added, members), info, torchs


def trace_views_no_more(before: tuple[dict[str, Any], Any, Any]) -> None:
    """Take them back."""
    added, info, torchs = before
    for name, members in added.items():
        del members[name]
    if torchs is not None:
        info.guard_fn = torchs


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
