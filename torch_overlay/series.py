"""The table: one patch a row, in the order of ``patches/series``."""

from .patching.patch import Kind, Patch

C10D = "torch.distributed.distributed_c10d"
LAYOUT = "torch.distributed._mesh_layout"
MESH = "torch.distributed.device_mesh"
REDISTRIBUTE = "torch.distributed.tensor._redistribute"
SPEC = "torch.distributed.tensor._dtensor_spec"
COLLECTIVES = "torch.distributed.tensor._collective_utils"
OURS = "torch_overlay.distributed"
COMPAT = "torch_overlay.compat"

_REPLACED = (
    "__init__",
    "mesh",
    "__eq__",
    "__getitem__",
    "_get_slice_mesh_layout",
    "_create_sub_mesh",
    "_get_all_submeshes",
    "_create_unflatten_mesh",
    "_concatenate",
    "_init_one_process_group",
    "get_group",
)
_ADDED = (
    "_rank_map",
    "_flatten_rank_map",
    "_preserve_rank_order",
    "__copy__",
    "__deepcopy__",
    "permute",
    "submesh_at",
    "flatten",
    "unflatten",
    "concatenate",
    "_beside",
    "_trace_view",
    "_traced_views",
)

# What torch has since 2.11.
_OLDER_ADDED = (
    "_compute_coordinate_on_dim",
    "__setstate__",
    "_is_current_rank_part_of_mesh",
    "_sym_get_coordinate",
)

# The upstream changes that would bring the same: one shared state a universe; safe merging of uneven shards.
SHARED_STATE = "pytorch/pytorch#175571"
SAFE_MERGING = "pytorch/pytorch#194457"


def _mesh(
    name: str, kind: Kind = Kind.REPLACE, releases: str = "", ends: str = SHARED_STATE, home: str = OURS
) -> Patch:
    """A row for one attribute of DeviceMesh; the mesh rows make sense only together."""
    body = f"{home}.device_mesh:_DeviceMesh.{name}"
    return Patch(f"{MESH}:DeviceMesh.{name}", body, kind, releases, ends, unit="mesh")


def _older_mesh(name: str, releases: str, kind: Kind = Kind.REPLACE) -> Patch:
    """A row for one attribute of DeviceMesh whose body only old releases need."""
    body = f"{COMPAT}.device_mesh:_OlderDeviceMesh.{name}"
    return Patch(f"{MESH}:DeviceMesh.{name}", body, kind, releases, SHARED_STATE, unit="mesh")


PATCHES: tuple[Patch, ...] = (
    Patch(
        f"{LAYOUT}:_FlatLayout",
        f"{COMPAT}._mesh_layout:_FlatLayout",
        Kind.ADD,
        "<2.13",
        unit="mesh",
    ),
    Patch(
        LAYOUT,
        f"{COMPAT}._mesh_layout:believe_files",
        Kind.HOOK,
        "<2.13",
        undo=f"{COMPAT}._mesh_layout:disbelieve_files",
        unit="mesh",
    ),
    Patch(
        f"{C10D}:_process_group_name",
        f"{OURS}.distributed_c10d:_process_group_name",
        ends="pytorch/pytorch#190431",
        unit="mesh",
    ),
    Patch(
        C10D,
        f"{COMPAT}.distributed_c10d:take_sort_ranks",
        Kind.HOOK,
        "<2.12",
        undo=f"{COMPAT}.distributed_c10d:forget_sort_ranks",
        unit="mesh",
    ),
    *(_mesh(name) for name in _REPLACED),
    *(_mesh(name, Kind.ADD) for name in _ADDED),
    _mesh("__hash__", home=COMPAT),
    *(_mesh(name, releases=">=2.11") for name in ("_compute_coordinate_on_dim", "__getstate__", "__setstate__")),
    _mesh("__getstate__", Kind.ADD, "<2.11"),
    *(_older_mesh(name, "<2.11", Kind.ADD) for name in _OLDER_ADDED),
    Patch(f"{MESH}:_get_pg_from_name", f"{COMPAT}.device_mesh:_get_pg_from_name", Kind.ADD, "<2.11", unit="mesh"),
    _mesh("_hash_key", releases=">=2.12"),
    _mesh("_hash_key", Kind.ADD, "<2.12"),
    _mesh("_stable_hash", releases=">=2.12"),
    _mesh("_stable_hash", Kind.ADD, "<2.12"),
    _mesh("_create_flatten_mesh", releases=">=2.13"),
    _mesh("_create_flatten_mesh", releases=">=2.12,<2.13", home=COMPAT),
    _older_mesh("_create_flatten_mesh", "<2.12"),
    _older_mesh("_unflatten", "<2.12"),
    Patch(
        f"{MESH}:_maybe_traced_group",
        f"{OURS}.device_mesh:_maybe_traced_group",
        Kind.ADD,
        "<2.14",
        "pytorch/pytorch#188215",
        unit="mesh",
    ),
    # Torch's own, from 2.15 on, would abort the default group of a mesh that has it, and none that redistributions use.
    _mesh("abort", Kind.ADD, "<2.15", "pytorch/pytorch#173815"),
    _mesh("abort", releases=">=2.15"),
    Patch(
        f"{MESH}:_normalize_backend_override",
        f"{OURS}.device_mesh:_normalize_backend_override",
        ends=SHARED_STATE,
        unit="mesh",
    ),
    Patch(f"{MESH}:init_device_mesh", f"{OURS}.device_mesh:init_device_mesh", ends=SHARED_STATE, unit="mesh"),
    Patch(
        MESH,
        "torch_overlay.hooks:meshes_need_nothing",
        Kind.HOOK,
        undo="torch_overlay.hooks:hand_back_meshes",
        unit="mesh",
    ),
    Patch(
        MESH,
        f"{COMPAT}.device_mesh:hold_groups",
        Kind.HOOK,
        "<2.11",
        undo=f"{COMPAT}.device_mesh:drop_groups",
        unit="mesh",
    ),
    Patch(
        REDISTRIBUTE,
        f"{OURS}.tensor._answers:forget_answers",
        Kind.HOOK,
        undo=f"{OURS}.tensor._answers:forget_answers",
        unit="redistribute",
    ),
    Patch(
        "torch.distributed.tensor._api",
        "torch_overlay.hooks:forget_shardings",
        Kind.HOOK,
        undo="torch_overlay.hooks:forget_shardings",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:redistribute_local_tensor",
        f"{OURS}.tensor._redistribute:redistribute_local_tensor",
        releases=">=2.11",
        ends=SAFE_MERGING,
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:redistribute_local_tensor",
        f"{COMPAT}.tensor:redistribute_local_tensor",
        releases="<2.11",
        ends=SAFE_MERGING,
        unit="redistribute",
    ),
    Patch(
        "torch.utils._debug_mode:DebugMode.record_redistribute_calls",
        f"{COMPAT}.debug_mode:_DebugMode.record_redistribute_calls",
        releases="<2.11",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:Redistribute.apply",
        f"{OURS}.tensor._redistribute:_Redistribute.apply",
        Kind.ADD,
        ">=2.13",
        "pytorch/pytorch#187380",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:Redistribute.apply",
        f"{COMPAT}.tensor:_Redistribute.apply",
        Kind.ADD,
        "<2.13",
        "pytorch/pytorch#187380",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:_optimize_transform_infos",
        f"{OURS}.tensor._redistribute:_optimize_transform_infos",
        releases=">=2.11",
        ends=SAFE_MERGING,
        unit="redistribute",
    ),
    Patch(
        f"{SPEC}:DTensorSpec._stable_hash",
        f"{OURS}.tensor._dtensor_spec:_DTensorSpec._stable_hash",
        releases=">=2.12",
        ends=SAFE_MERGING,
        unit="redistribute",
    ),
    Patch(
        f"{COLLECTIVES}:redistribute_cost",
        f"{OURS}.tensor._collective_utils:redistribute_cost",
        ends="pytorch/pytorch#169439",
        unit="cost",
    ),
    Patch(
        "torch.distributed.tensor",
        "torch_overlay.transfers.method:reach_other_meshes",
        Kind.HOOK,
        undo="torch_overlay.transfers.method:stay_on_one_mesh",
        unit="cross_mesh",
    ),
    Patch(
        "torch.distributed._state_dict_utils:_gather_state_dict",
        "torch_overlay.transfers.full_state:gather_together",
        Kind.HOOK,
        undo="torch_overlay.transfers.full_state:gather_one_by_one",
        unit="full_state_dict",
    ),
    Patch(
        "torch.nn.utils.clip_grad:_get_total_norm",
        "torch_overlay.transfers.norms:norm_by_mesh",
        Kind.HOOK,
        undo="torch_overlay.transfers.norms:norm_on_one_mesh",
        unit="clip_grad_norm",
    ),
    Patch(
        "torch.nn.utils.clip_grad:_clip_grads_with_norm_",
        "torch_overlay.transfers.norms:clip_by_mesh",
        Kind.HOOK,
        undo="torch_overlay.transfers.norms:clip_on_one_mesh",
        unit="clip_grad_norm",
    ),
    Patch(
        "torch.distributed.tensor._api",
        "torch_overlay.hooks:trace_views",
        Kind.HOOK,
        undo="torch_overlay.hooks:trace_views_no_more",
        unit="tracing",
    ),
    Patch(
        "torch._dynamo.trace_rules",
        "torch_overlay.hooks:trace_as_torch",
        Kind.HOOK,
        undo="torch_overlay.hooks:trace_as_user_code",
        unit="tracing",
    ),
)
