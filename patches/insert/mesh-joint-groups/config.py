"""Which groups over several axes there are."""

# Which groups over several axes of a mesh redistributions may use: "existing" views
# that somebody flattened; "whole" also one over all axes, made with the mesh;
# "create" also one over each set of axes.
mesh_joint_groups: str = Config(
    default="existing",
    env_name_default="TORCH_DISTRIBUTED_MESH_JOINT_GROUPS",
)

use_torchcomms = ...
