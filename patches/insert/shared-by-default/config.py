"""On by default."""

# Which axes of meshes share a process group if their ranks, backend and options are
# equal: "names" those of one name in views of one root mesh, "ranks" all in views of
# one root mesh, "off" none.
mesh_share_groups: str = Config(
    default="names",
    env_name_default="TORCH_DISTRIBUTED_MESH_SHARE_GROUPS",
)

use_torchcomms = ...
