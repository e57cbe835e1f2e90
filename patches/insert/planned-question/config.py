"""Whether redistributions are planned."""

# When enabled, a redistribution is planned as a whole: as few collectives as the groups at hand allow.
plan_redistribution: bool = Config(
    default=False,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
