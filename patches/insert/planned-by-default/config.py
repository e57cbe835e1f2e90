"""On by default."""

# Which groups over several axes of a mesh redistributions may use: "existing" views
# that somebody flattened; "whole" also one over all axes, made with the mesh;
# "create" also one over each set of axes.
mesh_joint_groups: str = Config(
    default="whole",
    env_name_default="TORCH_DISTRIBUTED_MESH_JOINT_GROUPS",
)

# When enabled, a redistribution is planned as a whole: it takes the plan that is
# estimated to be the fastest over the groups at hand.
plan_redistribution: bool = Config(
    default=True,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
