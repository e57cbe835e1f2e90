"""`python -m torch_overlay demo`: what a user feels, measured on gloo processes of this machine, or with its GPUs.

Four panels (`panels.py`): weights from a trainer to its servers, whole and only what changed; a server that is killed;
ranks that build different meshes; a redistribution that stock gets wrong. The parent process only reads arguments,
starts ranks and prints: what it imports (`command`, `panels`, `processes`) imports no torch.
"""
