"""The table of patches, in the order in which they are applied. The columns:

how       replace, add or hook, see `Kind`
releases  the releases of torch for which the row is applied
until     the upstream pull request that makes the row superfluous, if any; docs/developers/retired.md says more
target    what is patched: a module of torch, by its short name in `MODULES`, and a name in it
body      what takes its place. `ours` is the definition with the target's name in the file of the same name under
          `torch_overlay/distributed/`; for a method, in the class with an underscore before its name. Any other body is
          a path in `torch_overlay/`, where `*` stands for the target's name. A hook has a function for enable() and one
          for disable().

The rows under ``[mesh]`` are the unit "mesh", and so on. The rows of a unit need each other.
"""

from collections.abc import Iterator

from .patching.patch import Kind, Patch

MESH = "torch.distributed.device_mesh"
MODULES = {
    "api": "torch.distributed.tensor._api",
    "c10d": "torch.distributed.distributed_c10d",
    "clip_grad": "torch.nn.utils.clip_grad",
    "hf": "torch.distributed.checkpoint.hf_storage",
    "layout": "torch.distributed._mesh_layout",
    "mesh": MESH,
    "redistribute": "torch.distributed.tensor._redistribute",
    "rules": "torch._dynamo.trace_rules",
    "spec": "torch.distributed.tensor._dtensor_spec",
    "states": "torch.distributed._state_dict_utils",
    "tensor": "torch.distributed.tensor",
}

TABLE = """
# how   releases     until   target                                       body

[mesh]
# What files of newer releases name, and the names and the order of groups.
add     <2.13        -       layout:_FlatLayout                           compat._mesh_layout:*
hook    <2.13        -       layout       compat._mesh_layout:install_safe_globals/uninstall_safe_globals
replace all          #190431 c10d:_process_group_name                     compat.distributed_c10d:*
hook    <2.12        -       c10d         compat.distributed_c10d:install_sort_ranks/uninstall_sort_ranks

# Methods of a mesh.
replace all          #175571 mesh:DeviceMesh.__init__                     ours
replace all          #175571 mesh:DeviceMesh.mesh                         ours
replace all          #175571 mesh:DeviceMesh.__getitem__                  ours
replace all          #175571 mesh:DeviceMesh.__eq__                       ours
replace all          #175571 mesh:DeviceMesh.get_group                    ours
replace all          #175571 mesh:DeviceMesh._get_slice_mesh_layout       ours
replace all          #175571 mesh:DeviceMesh._create_sub_mesh             ours
replace all          #175571 mesh:DeviceMesh._get_all_submeshes           ours
replace all          #175571 mesh:DeviceMesh._create_unflatten_mesh       ours
replace all          #175571 mesh:DeviceMesh._concatenate                 ours
replace all          #175571 mesh:DeviceMesh._init_one_process_group      ours

# Members that torch's class has on no release.
add     all          #175571 mesh:DeviceMesh._rank_map                    ours
add     all          #175571 mesh:DeviceMesh._flatten_rank_map            ours
add     all          #175571 mesh:DeviceMesh._preserve_rank_order         ours
add     all          #175571 mesh:DeviceMesh._coordinate_on_dim           ours
add     all          #175571 mesh:DeviceMesh._dim_group_names             ours
add     all          #175571 mesh:DeviceMesh.__copy__                     ours
add     all          #175571 mesh:DeviceMesh.__deepcopy__                 ours
add     all          #175571 mesh:DeviceMesh.permute                      ours
add     all          #175571 mesh:DeviceMesh.submesh_at                   ours
add     all          #175571 mesh:DeviceMesh.flatten                      ours
add     all          #175571 mesh:DeviceMesh.unflatten                    ours
add     all          #175571 mesh:DeviceMesh.concatenate                  ours
add     all          #175571 mesh:DeviceMesh._beside                      ours
add     all          #175571 mesh:DeviceMesh._trace_view                  ours
add     all          #175571 mesh:DeviceMesh._traced_views                ours

# Members that differ between releases.
add     all          #175571 mesh:DeviceMesh._rank                        ours
replace all          #175571 mesh:DeviceMesh.__hash__                     compat.device_mesh:_DeviceMesh.*
replace all          #175571 mesh:DeviceMesh._compute_coordinate_on_dim   ours
replace all          #175571 mesh:DeviceMesh.__getstate__                 ours
replace all          #175571 mesh:DeviceMesh.__setstate__                 ours
replace >=2.12       #175571 mesh:DeviceMesh._hash_key                    ours
add     <2.12        #175571 mesh:DeviceMesh._hash_key                    ours
replace >=2.12       #175571 mesh:DeviceMesh._stable_hash                 ours
add     <2.12        #175571 mesh:DeviceMesh._stable_hash                 ours
replace >=2.13       #175571 mesh:DeviceMesh._create_flatten_mesh         ours
replace >=2.12,<2.13 #175571 mesh:DeviceMesh._create_flatten_mesh         compat.device_mesh:_DeviceMesh.*
replace <2.12        #175571 mesh:DeviceMesh._create_flatten_mesh         compat.device_mesh:_OlderDeviceMesh.*
replace <2.12        #175571 mesh:DeviceMesh._unflatten                   compat.device_mesh:_OlderDeviceMesh.*

# Functions, and members that came with a later release.
add     <2.14        #188215 mesh:_maybe_traced_group                     ours
# Torch's abort() since 2.15 aborts the default group if a mesh uses it, but no group over several axes.
add     <2.15        #173815 mesh:DeviceMesh.abort                        ours
replace >=2.15       #175571 mesh:DeviceMesh.abort                        ours
replace all          #175571 mesh:_normalize_backend_override             ours
replace all          #175571 mesh:init_device_mesh                        ours

# Meshes that exist when enable() or disable() is called.
hook    all          -       mesh         hooks:install_mesh_reset/uninstall_mesh_reset

[redistribute]
# Caches that hold answers of torch, or ours after disable().
hook    all          -       redistribute distributed.tensor._runner.answers:forget_answers/forget_answers
hook    all          -       api          distributed._mesh.caches:forget_shardings/forget_shardings

replace all          #194457 redistribute:redistribute_local_tensor       ours

add     >=2.13       #187380 redistribute:Redistribute.apply              ours
add     <2.13        #187380 redistribute:Redistribute.apply              compat.tensor:_Redistribute.*

replace all          #194457 redistribute:_optimize_transform_infos       compat.merging:*
replace all          #175571 spec:DTensorSpec._check_equals               ours
replace >=2.12       #194457 spec:DTensorSpec._stable_hash                ours

[cross_mesh]
hook    all          -       tensor       torch_patches.cross_mesh:install_cross_mesh/uninstall_cross_mesh

[full_state_dict]
hook    all          -       states:_gather_state_dict      torch_patches.full_state:install_gather/uninstall_gather
hook    all          -       states:_distribute_state_dict  torch_patches.full_state:install_scatter/uninstall_scatter
hook    all          -       states:_distribute_tensors     torch_patches.full_state:install_cut/uninstall_cut
hook    all          -       api:distribute_tensor         torch_patches.strided:install_distribute/uninstall_distribute

[checkpoint]
# Strided shards of which a rank holds several boxes.
replace all          -       api:DTensor.__create_write_items__           torch_patches.chunks:_DTensor.*
replace all          -       api:DTensor.__create_chunk_list__            torch_patches.chunks:_DTensor.*
replace all          -       api:DTensor.__get_tensor_shard__             torch_patches.chunks:_DTensor.*
replace all          -       hf:HuggingFaceStorageWriter.write_data       torch_patches.safetensors_files:_Writer.*

[clip_grad_norm]
hook    all          -       clip_grad:_get_total_norm      torch_patches.norms:install_norm/uninstall_norm
hook    all          -       clip_grad:_clip_grads_with_norm_ torch_patches.norms:install_clip/uninstall_clip
hook    all          -       tensor       torch_patches.empty_shards:install_whole_norms/uninstall_whole_norms

[tracing]
hook    all          -       api          hooks:install_traced_views/uninstall_traced_views
hook    all          -       rules        hooks:install_trace_rules/uninstall_trace_rules
"""


def _patches(table: str) -> Iterator[Patch]:
    """Yield the rows of the table. Its lines are rows, ``[units]`` and ``# comments``."""
    unit = ""
    for line in filter(None, table.splitlines()):
        if line.startswith("["):
            unit = line.strip("[]")
        elif not line.startswith("#"):
            yield _patch(unit, *line.split())


def _patch(unit: str, how: str, releases: str, until: str, target: str, body: str) -> Patch:
    short, colon, qualname = target.partition(":")
    module = MODULES[short]
    owner, dot, name = qualname.rpartition(".")
    # "ours": device_mesh.py of ours has a class _DeviceMesh with the bodies for torch's class DeviceMesh.
    if body == "ours":
        body = f"{module.removeprefix('torch.')}:{dot and '_'}{owner}{dot}*"
    body, _, undo = f"torch_overlay.{body.replace('*', name)}".partition("/")
    return Patch(
        target=module + colon + qualname,
        body=body,
        kind=Kind[how.upper()],
        releases="" if releases == "all" else releases,
        ends=None if until == "-" else f"pytorch/pytorch{until}",
        undo=f"{body.partition(':')[0]}:{undo}" if undo else None,
        unit=unit,
    )


PATCHES: tuple[Patch, ...] = (*_patches(TABLE),)
