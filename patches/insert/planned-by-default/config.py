"""On by default."""

# Which axes of meshes share a process group if their ranks, backend and options are
# equal: "names" those of one name in views of one root mesh, "ranks" all in views of
# one root mesh, "world" those of different root meshes, too, "off" none.
mesh_share_groups: str = Config(
    default="names",
    env_name_default="TORCH_DISTRIBUTED_MESH_SHARE_GROUPS",
)

# Which groups over several axes of a mesh redistributions may use: "existing" views
# that somebody flattened; "whole" also one over all axes, made with the mesh;
# "create" also one over each set of axes.
mesh_joint_groups: str = Config(
    default="whole",
    env_name_default="TORCH_DISTRIBUTED_MESH_JOINT_GROUPS",
)

# When enabled, a redistribution runs as one collective, two if it also reduces.
plan_redistribution: bool = Config(
    default=True,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
