"""What meshes may be asked for. All of it is off."""

# Which axes of meshes share a process group if their ranks, backend and options are
# equal: "names" those of one name in views of one root mesh, "ranks" all in views of
# one root mesh, "world" those of different root meshes, too. With "off" each axis of
# each view has a group of its own.
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
# torchcomms; "create" one over each set of two or more of these axes, in any world.
# "whole" and "create" need mesh_share_groups other than "off". With these
# two a flattened view that has the default group doesn't serve.
mesh_joint_groups: str = Config(
    default="existing",
    env_name_default="TORCH_DISTRIBUTED_MESH_JOINT_GROUPS",
)

# When enabled, all ranks of the world compare the meshes that they build, through the
# default group's store, before they make groups. A mismatch is an error on every rank.
mesh_check: bool = False

# How fast the axes are, for choosing plans: the name of each, its bytes per second and
# its seconds of latency, such as (("dp", 5e10, 1e-5), ("tp", 4e11, 1e-6)).
mesh_topology: tuple[tuple[str, float, float], ...] | None = None

# What redistribute_cost estimates: the "steps" one by one, or the "plan".
redistribute_cost: str = "steps"

# When enabled, a redistribution is planned as a whole: it takes the plan that is
# estimated to be the fastest over the groups at hand.
plan_redistribution: bool = Config(
    default=False,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
