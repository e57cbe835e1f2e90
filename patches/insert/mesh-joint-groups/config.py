"""Which groups over several axes there are."""

# Which groups over several axes of a mesh redistributions may use: "existing" views
# that somebody flattened; "whole" also one over all axes of more than one rank, made
# with the mesh or by _unflatten, unless the world is bound to a device or uses
# torchcomms. It needs mesh_share_groups other than "off". With it a flattened view
# that has the default group doesn't serve.
mesh_joint_groups: str = Config(
    default="existing",
    env_name_default="TORCH_DISTRIBUTED_MESH_JOINT_GROUPS",
)

use_torchcomms = ...
