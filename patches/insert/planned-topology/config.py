"""How fast the axes are."""

# Bytes per second and seconds of latency of each axis, by name, for choosing plans.
mesh_topology: tuple[tuple[str, float, float], ...] | None = None

use_torchcomms = ...
