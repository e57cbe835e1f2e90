"""Whether redistributions are planned."""

# When enabled, a redistribution runs as one collective, two if it also reduces.
plan_redistribution: bool = Config(
    default=False,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
