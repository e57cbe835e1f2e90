"""What enable() and disable() do besides patching functions: they change state, caches and lists that torch keeps."""

import os
from typing import Any


def install_mesh_reset() -> None:
    """Do nothing, for enable(): meshes that exist already get their state when they are first used."""


def uninstall_mesh_reset(_: None) -> None:
    """Give meshes of the overlay the attributes that torch's own code reads, and remove our state."""
    from torch_overlay.distributed._mesh.state import hand_back

    hand_back()


def install_trace_rules() -> tuple[list[str], dict[str, Any]]:
    """Let dynamo skip our files and inline their functions, as those of ``torch/distributed``. It builds its lists of
    files anew after each init_process_group, so the functions that build them are replaced."""
    from torch._dynamo import trace_rules  # imported already: the row waits for it

    here = os.path.dirname(__file__)
    # Dynamo compares with forward slashes, and a folder ends in one, so that "compat" isn't a prefix of "compat_x".
    files = [os.path.join(here, name, "").replace(os.sep, "/") for name in ("distributed", "compat")]
    lists = {name: getattr(trace_rules, name) for name in ("get_mod_inlinelist", "get_mod_skiplist")}
    for name, torchs in lists.items():
        setattr(trace_rules, name, _with_files(files, torchs))
    return files, lists


# Members of a mesh that compiled code may use. Dynamo inlines the first, and calls the others while it compiles.
_INLINED = ("permute", "submesh_at", "flatten", "unflatten", "concatenate", "_beside")
_CALLED = ("_trace_view", "_traced_views")


def install_traced_views() -> tuple[dict[str, Any], Any, Any]:
    """Let dynamo trace our methods that return views, and its guard compare the groups of meshes: code that was
    compiled for one mesh would run with an equal mesh, and communicate over the groups of the first."""
    from torch.distributed.device_mesh import DeviceMesh

    from torch_overlay.distributed._mesh.caches import compiled_group_key
    from torch_overlay.distributed._mesh.state import private_group_key
    from torch_overlay.distributed._mesh.universe import making_private

    try:
        from torch._library.opaque_object import _OPAQUE_TYPES as known
    except ImportError:  # before 2.12 dynamo knows meshes in another way, and breaks the graph
        known = {}
    info = known.get(DeviceMesh)
    # A method of ours is traced as the method of torch's that is most like it: `_flatten` is inlined, `size` is called
    # while compiling. On a release that knows neither, nothing is added, and dynamo breaks the graph as on stock.
    members = getattr(info, "members", None) or {}
    kinds = {name: members.get(like) for names, like in ((_INLINED, "_flatten"), (_CALLED, "size")) for name in names}
    added = {name: kind for name, kind in kinds.items() if kind is not None and name not in members}
    members.update(added)
    torchs: Any = getattr(info, "guard_fn", None)

    def compared(mesh: DeviceMesh) -> list[Any]:
        """Return what dynamo's guard compares of a mesh: what torch's guard does, and its groups."""
        whose = (*private_group_key(mesh), *compiled_group_key(mesh), making_private.get())
        return [*torchs(mesh), mesh._preserve_rank_order, *whose]

    if info is not None and torchs is not None:
        info.guard_fn = compared
    return dict.fromkeys(added, members), info, torchs


def uninstall_traced_views(before: tuple[dict[str, Any], Any, Any]) -> None:
    """Undo `install_traced_views`: take our methods out of dynamo's tables, and put its guard back."""
    added, info, torchs = before
    for name, members in added.items():
        del members[name]
    if torchs is not None:
        info.guard_fn = torchs


def _with_files(files: list[str], torchs: Any) -> Any:
    """Return torch's function that builds a list of files, with ours added."""

    def files_and_torchs() -> set[str]:
        known = torchs()
        known.update(files)  # into torch's own cached set, from which `uninstall_trace_rules` takes them again
        return known

    # Dynamo empties these caches when a process group is made.
    files_and_torchs.cache_clear = torchs.cache_clear  # type: ignore[attr-defined]
    return files_and_torchs


def uninstall_trace_rules(traced: tuple[list[str], dict[str, Any]]) -> None:
    """Undo `install_trace_rules`. Dynamo then traces our files as it does a user's."""
    from torch._dynamo import trace_rules

    files, lists = traced
    for name, torchs in lists.items():
        torchs().difference_update(files)
        setattr(trace_rules, name, torchs)
