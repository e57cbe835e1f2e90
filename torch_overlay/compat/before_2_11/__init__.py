"""For torch 2.10."""
