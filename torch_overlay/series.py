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

_REPLACED = ("__eq__", "get_group")
# Before 2.10 torch has none of these.
_SINCE_2_10 = (
    "_get_slice_mesh_layout",
    "_create_sub_mesh",
    "_get_all_submeshes",
    "_create_unflatten_mesh",
    "_concatenate",
    "_init_one_process_group",
)
_ADDED = (
    "_rank_map",
    "_flatten_rank_map",
    "_preserve_rank_order",
    "_coordinate_on_dim",
    "_dim_group_names",
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

# What a mesh has since 2.10, and what it says otherwise before.
_OLDEST_ADDED = ("mesh", "device_type", "mesh_dim_names", "_flatten_mesh_list", "__getstate__", "_create_flatten_mesh")
_FINDING = ("_get_root_mesh", "_get_root_mesh_dim", "_get_mesh_dim_by_name")
_OLDEST_REPLACED = ("__init__", "__getitem__", "__hash__", "size", "ndim", "shape")
_ADOPTING = ("_device_type", "_mesh_dim_names", "_root_mesh", "_flatten_mapping", "_pg_registry", "_layout", "_rank")
_FOUND_BY = ("child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims")
_RESOURCES = ("get_root_mesh", "create_sub_mesh", "create_flatten_mesh", "_get_slice_mesh_dims", "_get_all_submeshes")

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


def _oldest(path: str, kind: Kind = Kind.REPLACE, home: str = "device_mesh:_OldestDeviceMesh") -> Patch:
    """A row that is for releases before 2.10 alone."""
    body = f"{COMPAT}.{home}.{path.rpartition('.')[2]}"
    return Patch(f"{MESH}:{path}", body, kind, "<2.10", SHARED_STATE, unit="mesh")


def _oldest_spec(name: str) -> Patch:
    """A row for what DTensorSpec has since 2.10."""
    body = f"{COMPAT}.tensor:_DTensorSpec.{name}"
    return Patch(f"{SPEC}:DTensorSpec.{name}", body, Kind.ADD, "<2.10", unit="redistribute")


PATCHES: tuple[Patch, ...] = (
    Patch(
        f"{LAYOUT}:_FlatLayout",
        f"{COMPAT}._mesh_layout:_FlatLayout",
        Kind.ADD,
        ">=2.10,<2.13",
        unit="mesh",
    ),
    Patch(
        LAYOUT,
        f"{COMPAT}._mesh_layout:believe_files",
        Kind.HOOK,
        ">=2.10,<2.13",
        undo=f"{COMPAT}._mesh_layout:disbelieve_files",
        unit="mesh",
    ),
    Patch(
        MESH,
        f"{COMPAT}._mesh_layout:bring_module",
        Kind.HOOK,
        "<2.10",
        undo=f"{COMPAT}._mesh_layout:take_module",
        unit="mesh",
    ),
    Patch(f"{C10D}:GroupName", f"{COMPAT}.distributed_c10d:GroupName", Kind.ADD, "<2.10", unit="mesh"),
    Patch(
        f"{C10D}:_cleanup_process_group_global_state",
        f"{COMPAT}.distributed_c10d:_cleanup_process_group_global_state",
        Kind.ADD,
        "<2.10",
        unit="mesh",
    ),
    Patch(
        f"{C10D}:_process_group_name",
        f"{COMPAT}.distributed_c10d:_process_group_name",
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
    *(_oldest(f"DeviceMesh.{name}", Kind.ADD) for name in (*_OLDEST_ADDED, *_FINDING, *_ADOPTING)),
    *(_oldest(f"DeviceMesh.{name}") for name in _OLDEST_REPLACED),
    *(_oldest(f"_MeshEnv.{name}", home="mesh_env:_MeshEnv") for name in _RESOURCES),
    *(_oldest(f"_MeshEnv.{name}", Kind.ADD, "mesh_env:_MeshEnv") for name in _FOUND_BY),
    *(_mesh(name, releases=">=2.10") for name in ("__init__", "mesh", "__getitem__")),
    *(_mesh(name) for name in _REPLACED),
    *(_mesh(name, releases=">=2.10") for name in _SINCE_2_10),
    *(_mesh(name, Kind.ADD, "<2.10") for name in _SINCE_2_10),
    *(_mesh(name, Kind.ADD) for name in _ADDED),
    _mesh("_rank", Kind.ADD, ">=2.10"),
    _mesh("__hash__", releases=">=2.10", home=COMPAT),
    *(_mesh(name, releases=">=2.11") for name in ("_compute_coordinate_on_dim", "__getstate__")),
    _mesh("__setstate__", releases=">=2.11", home=COMPAT),
    _mesh("__getstate__", Kind.ADD, ">=2.10,<2.11"),
    *(_older_mesh(name, "<2.11", Kind.ADD) for name in _OLDER_ADDED),
    Patch(f"{MESH}:_get_pg_from_name", f"{COMPAT}.device_mesh:_get_pg_from_name", Kind.ADD, "<2.11", unit="mesh"),
    _mesh("_hash_key", releases=">=2.12"),
    _mesh("_hash_key", Kind.ADD, "<2.12"),
    _mesh("_stable_hash", releases=">=2.12"),
    _mesh("_stable_hash", Kind.ADD, "<2.12"),
    _mesh("_create_flatten_mesh", releases=">=2.13"),
    _mesh("_create_flatten_mesh", releases=">=2.12,<2.13", home=COMPAT),
    *(_older_mesh(name, ">=2.10,<2.12") for name in ("_create_flatten_mesh", "_unflatten")),
    _older_mesh("_unflatten", "<2.10", Kind.ADD),
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
        ">=2.10,<2.11",
        undo=f"{COMPAT}.device_mesh:drop_groups",
        unit="mesh",
    ),
    Patch(
        MESH,
        f"{COMPAT}.tensor_mesh:hold_views",
        Kind.HOOK,
        "<2.10",
        undo=f"{COMPAT}.tensor_mesh:hand_back_tensors",
        unit="mesh",
    ),
    Patch(
        REDISTRIBUTE,
        f"{OURS}.tensor._plans.answers:forget_answers",
        Kind.HOOK,
        undo=f"{OURS}.tensor._plans.answers:forget_answers",
        unit="redistribute",
    ),
    Patch(
        "torch.distributed.tensor._api",
        f"{OURS}._mesh.caches:forget_shardings",
        Kind.HOOK,
        undo=f"{OURS}._mesh.caches:forget_shardings",
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
        releases=">=2.10,<2.11",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
        f"{COMPAT}.tensor:_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
        Kind.ADD,
        "<2.10",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        f"{COMPAT}.tensor:_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        Kind.ADD,
        "<2.11",
        unit="redistribute",
    ),
    Patch(f"{SPEC}:ShardOrderEntry", f"{COMPAT}._mesh_layout:ShardOrderEntry", Kind.ADD, "<2.10", unit="redistribute"),
    Patch(
        "torch.distributed.tensor.placement_types:Replicate.__getstate__",
        f"{COMPAT}.tensor:_Replicate.__getstate__",
        Kind.ADD,
        "<2.10",
        unit="redistribute",
    ),
    *(_oldest_spec(name) for name in ("shard_order", "is_default_device_order", "compute_default_shard_order")),
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
        ">=2.10,<2.13",
        "pytorch/pytorch#187380",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:Redistribute.apply",
        f"{COMPAT}.tensor:_OldestRedistribute.apply",
        Kind.ADD,
        "<2.10",
        "pytorch/pytorch#187380",
        unit="redistribute",
    ),
    Patch(
        f"{REDISTRIBUTE}:_optimize_transform_infos",
        f"{COMPAT}.merging:_optimize_transform_infos",
        releases=">=2.11",
        ends=SAFE_MERGING,
        unit="redistribute",
    ),
    Patch(
        f"{SPEC}:DTensorSpec._check_equals",
        f"{OURS}.tensor._dtensor_spec:_DTensorSpec._check_equals",
        releases=">=2.10",
        ends=SHARED_STATE,
        unit="redistribute",
    ),
    Patch(
        f"{SPEC}:DTensorSpec.__eq__",
        f"{COMPAT}.tensor:_DTensorSpec.__eq__",
        releases="<2.10",
        ends=SHARED_STATE,
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
        "torch.distributed._state_dict_utils:_distribute_state_dict",
        "torch_overlay.transfers.full_state:scatter_by_chunks",
        Kind.HOOK,
        undo="torch_overlay.transfers.full_state:scatter_by_axes",
        unit="full_state_dict",
    ),
    Patch(
        "torch.distributed._state_dict_utils:_distribute_tensors",
        "torch_overlay.transfers.full_state:cut_by_chunks",
        Kind.HOOK,
        undo="torch_overlay.transfers.full_state:cut_by_axes",
        unit="full_state_dict",
    ),
    Patch(
        "torch.distributed.tensor._api:distribute_tensor",
        "torch_overlay.transfers.strided:distribute_by_chunks",
        Kind.HOOK,
        ">=2.10",  # before, torch reads other shards from the placements
        undo="torch_overlay.transfers.strided:distribute_by_axes",
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
