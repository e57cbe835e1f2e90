"""Before torch 2.10 these stand in for the modules of the same names in `torch_overlay.distributed`."""
