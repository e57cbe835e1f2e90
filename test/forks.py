"""Processes of the tests: forked from one server that has imported torch, where that can be.

A spawned rank imports torch by itself, which takes seconds of processor time; a forked one has it. A process of pytest
has one such server, and whoever comes first starts it, so all ask here for what it imports.
"""

import multiprocessing.context
import random
import socket

from torch_overlay.testing import pool

# Nothing of ours: the server doesn't have the path of the tests, and a torch with the overlay on would fork it on.
PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
PRELOADED += ["torch._dynamo", "torch.testing._internal.common_distributed"]
# The first compiled call imports these, some 600 modules in a second of processor time on each of eight ranks.
PRELOADED += [
    "torch._dynamo.testing",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "sympy.combinatorics",
]


def context() -> multiprocessing.context.BaseContext:
    """The context whose processes are forked from the server."""
    return pool.context(PRELOADED)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at.

    It lies below the ports that Linux gives to connections (32768 and up). A port that the kernel picks may be given
    to another test's connection before the rank that it is meant for listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as listens:
            try:
                listens.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
