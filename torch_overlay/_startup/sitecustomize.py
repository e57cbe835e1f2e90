"""Turn the overlay on in this process as soon as torch is imported; processes that import none pay nothing.

Python's ``site`` runs this file because `python -m torch_overlay run` puts its folder first on PYTHONPATH, which child
processes inherit. A ``sitecustomize`` that would have run without us runs too.
"""

import atexit
import os
import sys
import types
from collections.abc import MutableMapping

VARIABLE = "TORCH_OVERLAY_RUN"  # 1; or report:PID where PID runs the program; or claimed by a rank 0
NAME = "sitecustomize"
# The overlay goes on when the last of these has been imported: torch brings the other on all supported releases.
AWAITED = ("torch", "torch.distributed.device_mesh")


def start() -> None:
    """When Python starts: remove our folder from the path, watch for torch if `VARIABLE` is set, and run the next
    ``sitecustomize``. What that raises is passed on."""
    here = os.path.dirname(os.path.abspath(__file__))
    # The program sees the path that it would have had; its children get the folder from the environment.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    if os.environ.get(VARIABLE, "").partition(":")[0] in ("1", "report", "claimed"):
        watch(os.path.dirname(here), reports(os.environ, os.getpid(), os.getppid()))
    run_next()


def reports(environ: MutableMapping[str, str], pid: int, parent: int) -> bool:
    """Whether this process prints the status when it ends: rank 0 of all under `run --report`. Changes the variable in
    `environ` for processes that it starts, where it is rank 0.

    That is the process that a launcher gave this rank, or the one that runs the program. Data loaders and compile
    workers inherit the rank, so rank 0 takes the request out of their environment. One launcher may start another (a
    cluster sets RANK on its nodes, and torchrun sets it again), so rank 0 of torchrun takes the request over.
    """
    asked, _, program = environ[VARIABLE].partition(":")
    rank = environ.get("RANK")
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    if asked not in ("report", "claimed") or (asked == "claimed" and not by_torchrun):
        return False
    if rank == "0":
        environ[VARIABLE] = "1" if by_torchrun else "claimed"
        return True
    return rank is None and asked == "report" and program == str(pid if os.name == "posix" else parent)


def report(overlay: types.ModuleType, pid: int) -> None:
    """Print the status to standard error at exit, not in a fork, which inherits the handler, nor in torchrun itself."""
    if os.getpid() == pid and "torch.distributed.launcher.api" not in sys.modules:
        print(overlay.status(), file=sys.stderr)


def watch(package: str, reporting: bool) -> None:
    """Turn the overlay on when torch has been imported, by this file's torch_overlay, whatever the program's path has.
    What `enable` raises is raised by that import statement."""
    # Our folder's parent is on the path for these imports only: a checkout, say, has more in it than the package.
    parent = os.path.dirname(package)
    sys.path.insert(0, parent)
    try:
        from torch_overlay.patching.import_hook import AfterImport
    finally:
        sys.path.remove(parent)

    def imported(names):
        arrived.extend(names)
        if "torch" in arrived and AWAITED[1] in sys.modules:
            hook.remove()
            import torch_overlay

            torch_overlay.enable()
            if reporting:
                atexit.register(report, torch_overlay, os.getpid())

    arrived: list[str] = []
    hook = AfterImport(AWAITED, imported)
    hook.install()


def run_next() -> None:
    """Run the next ``sitecustomize`` on the path in our place, if there is one. What it raises is passed on."""
    ours = sys.modules.pop(NAME)
    try:
        __import__(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        sys.modules[NAME] = ours


if __name__ == NAME:
    start()
