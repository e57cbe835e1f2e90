"""Whether ranks compare their meshes."""

# When enabled, all ranks of the world compare the meshes that they build, through the
# default group's store, before they make groups. A mismatch is an error on every rank.
mesh_check: bool = False

use_torchcomms = ...
