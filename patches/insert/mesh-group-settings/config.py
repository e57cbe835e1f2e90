"""Which meshes share groups, and who makes them."""

# Which axes of meshes share a process group if their ranks, backend and options are
# equal: "names" those of one name in views of one root mesh, "ranks" all in views of
# one root mesh, "world" those of different root meshes, too. With "off" each axis of
# each view has a group of its own, which all ranks of the world make.
mesh_share_groups: str = Config(
    default="off",
    env_name_default="TORCH_DISTRIBUTED_MESH_SHARE_GROUPS",
)

# Who calls new_group for a group that is shared: its "members" alone, or all ranks of
# the "world". Some backends need the world in any case.
mesh_create_groups: str = "members"

use_torchcomms = ...
