"""Whether ranks compare their meshes."""

# When enabled, ranks compare what they build before a mesh makes groups.
mesh_check: bool = False

use_torchcomms = ...
