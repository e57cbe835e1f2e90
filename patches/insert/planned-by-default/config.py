"""On by default."""

# Which groups over several axes of a mesh redistributions may use: "existing" views
# that somebody flattened; "whole" also one over all axes of more than one rank, made
# with the mesh or by _unflatten, unless the world is bound to a device or uses
# torchcomms, or mesh_share_groups is "off". With "whole" a flattened view that has the
# default group doesn't serve.
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
