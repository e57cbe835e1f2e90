"""`python -m torch_overlay demo`: what a user feels, measured on gloo processes of this machine, or with its GPUs.

Three panels (`panels.py`): weights from a trainer to its servers, ranks that build different meshes, a redistribution
that stock gets wrong. `--train` trains a byte-level transformer with experts instead (`train.py`), by FSDP2, tensor and
expert parallelism, once on stock torch and once under the overlay. The parent process only reads arguments, starts
ranks and prints: what it imports (`command`, `panels`, `train`, `processes`) imports no torch.
"""
