"""There may be one over each set of axes."""

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

use_torchcomms = ...
