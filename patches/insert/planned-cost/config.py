"""What a redistribution costs."""

# What redistribute_cost estimates: the "steps" one by one, or the "plan".
redistribute_cost: str = "steps"

use_torchcomms = ...
