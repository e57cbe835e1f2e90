"""Whether redistributions are planned."""

# When enabled, a redistribution is planned as a whole, over the groups at hand, and not mesh dim by mesh dim.
plan_redistribution: bool = Config(
    default=False,
    env_name_default="TORCH_DISTRIBUTED_PLAN_REDISTRIBUTION",
)

use_torchcomms = ...
