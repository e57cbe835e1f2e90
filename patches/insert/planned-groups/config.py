"""Whether redistributions are planned."""

# Bytes per second and seconds of latency of each axis, by name, for choosing plans.
mesh_topology: tuple[tuple[str, float, float], ...] | None = None

# When enabled, a redistribution runs as one collective, two if it also reduces.
plan_redistribution: bool = Config(
    default=False,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
