"""`python -m torch_overlay demo`: one training job, on stock torch and under the overlay, side by side.

A small byte-level transformer with a mixture-of-experts block learns real text on gloo processes of this machine, with
FSDP2, tensor and expert parallelism. Both runs do the same arithmetic; what differs is the groups that it takes.
Importing this package imports no torch: the parent process only reads arguments, starts workers and prints.
"""

from torch_overlay.demo.command import main

__all__ = ["main"]
