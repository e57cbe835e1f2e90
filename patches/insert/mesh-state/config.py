"""What meshes may be asked for. All of it is off."""

# Which axes of meshes share a process group if their ranks, backend and options are
# equal: "names" those of one name in views of one root mesh, "ranks" all in views of
# one root mesh. With "off" each axis of each view has a group of its own.
mesh_share_groups: str = Config(
    default="off",
    env_name_default="TORCH_DISTRIBUTED_MESH_SHARE_GROUPS",
)

# Who calls new_group for a mesh: the "members" of the group alone, or all ranks of the
# "world". Some backends need the world in any case.
mesh_create_groups: str = "members"

# Which groups over several axes of a mesh redistributions may use: "existing" views
# that somebody flattened; "whole" also one over all axes of more than one rank, made
# with the mesh or by _unflatten, unless the world is bound to a device or uses
# torchcomms, or mesh_share_groups is "off". With "whole" a flattened view that has the
# default group doesn't serve.
mesh_joint_groups: str = Config(
    default="existing",
    env_name_default="TORCH_DISTRIBUTED_MESH_JOINT_GROUPS",
)

# When enabled, all ranks of the world compare the meshes that they build, through the
# default group's store, before they make groups. A mismatch is an error on every rank.
mesh_check: bool = False

# When enabled, a redistribution is planned as a whole: it takes the plan that is
# estimated to be the fastest over the groups at hand.
plan_redistribution: bool = Config(
    default=False,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
