"""The commands of ``python -m torch_overlay``; none imports torch before its arguments are read."""
