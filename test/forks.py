"""Processes of the tests: forked from one server that has imported torch, where that can be.

A spawned rank imports torch by itself, which takes seconds of processor time; a forked one has it. A process of pytest
has one such server, and whoever comes first starts it, so all ask here for what it imports.
"""

import multiprocessing

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
# Nothing of ours: the server doesn't have the path of the tests, and a torch with the overlay on would fork it on.
PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
PRELOADED += ["torch._dynamo", "torch.testing._internal.common_distributed"]


def context() -> multiprocessing.context.BaseContext:
    """The context whose processes are forked from the server."""
    found = multiprocessing.get_context(METHOD)
    if METHOD == "forkserver":
        found.set_forkserver_preload(PRELOADED)
    return found
