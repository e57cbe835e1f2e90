"""For torch 2.10 to 2.12, whose layouts are nested tuples."""
