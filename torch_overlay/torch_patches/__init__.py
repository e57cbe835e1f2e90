"""What unmodified programs gain: torch's own functions for full state dicts, norms, strided shards and other meshes, by
this package's exchanges. `series.py` says which function of torch's each replaces."""
