"""Whether redistributions are planned, and which groups over several axes they use."""

# Which groups over several axes of a mesh redistributions may use: "existing" views
# that somebody flattened; "whole" also one over all axes, made with the mesh;
# "create" also one over each set of axes.
mesh_joint_groups: str = Config(
    default="existing",
    env_name_default="TORCH_DISTRIBUTED_MESH_JOINT_GROUPS",
)

# Bytes per second and seconds of latency of each axis, by name, for choosing plans.
mesh_topology: tuple[tuple[str, float, float], ...] | None = None

# When enabled, a redistribution runs as one collective, two if it also reduces.
plan_redistribution: bool = Config(
    default=False,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
