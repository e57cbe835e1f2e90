"""How fast the axes are."""

# How fast the axes are, for choosing plans: the name of each, its bytes per second and its seconds of latency, such as
# (("dp", 5e10, 1e-5), ("tp", 4e11, 1e-6)).
mesh_topology: tuple[tuple[str, float, float], ...] | None = None

use_torchcomms = ...
