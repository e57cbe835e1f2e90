"""Where the tensors of the ranks are: ``--device``, ``--backend`` and ``--ranks-per-gpu`` of pytest, for the suites of
test/redistribute and test/transfer. By default on the CPU, by gloo.

Ranks read it from their environment. Tests make tensors without saying where, and meshes on `DEVICE`. The process of
pytest, which plays ranks of fake worlds, stays on the CPU.
"""

import functools
import multiprocessing
import os

NAMES = {"device": "OVERLAY_TESTS_DEVICE", "backend": "OVERLAY_TESTS_BACKEND", "ranks_per_gpu": "OVERLAY_TESTS_SHARE"}
IS_RANK = multiprocessing.parent_process() is not None
DEVICE = os.environ.get(NAMES["device"], "cpu") if IS_RANK else "cpu"
BACKEND = os.environ.get(NAMES["backend"], "gloo" if DEVICE == "cpu" else "nccl")
RANKS_PER_GPU = int(os.environ.get(NAMES["ranks_per_gpu"], "8"))  # in a row share a device


def add_options(parser):
    """Of pytest."""
    group = parser.getgroup("torch_overlay's own suites")
    group.addoption("--device", help="of the ranks of test/redistribute and test/transfer; cpu if not given")
    group.addoption("--backend", help="of their worlds: gloo, nccl; what fits the device if not given")
    group.addoption("--ranks-per-gpu", help="how many of them share a device; all if not given")


def pass_on(config):
    """The options to this process' imports, and to the ranks."""
    for option, name in NAMES.items():
        value = config.getoption(option, None)
        if value is not None:
            os.environ[name] = value


def take(rank, device=DEVICE):
    """In a rank, before all else: its device, on which tensors are made that don't say where."""
    if device == "cpu":
        return
    import torch

    own = torch.device(device, rank // RANKS_PER_GPU)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    torch.set_default_device(own)


def from_host(make):
    """For a function that makes a tensor by random numbers of the host: it comes where tensors are by default."""

    @functools.wraps(make)
    def made(*given, **more):
        import torch

        with torch.device("cpu"):
            found = make(*given, **more)
        return found.to(torch.get_default_device())

    return made
