"""Turn the overlay on in this process as soon as torch is imported; processes that import none pay nothing.

Python's ``site`` runs this file because `python -m torch_overlay run` puts its folder first on PYTHONPATH, which child
processes inherit. A ``sitecustomize`` that would have run without us runs too.
"""

import os
import sys

NAME = "sitecustomize"
# The overlay goes on when the last of these has been imported: torch brings the other on all supported releases.
AWAITED = ("torch", "torch.distributed.device_mesh")


def start() -> None:
    """What the file does when Python starts."""
    here = os.path.dirname(os.path.abspath(__file__))
    # The program sees the path that it would have had; its children get the folder from the environment.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    if os.environ.get("TORCH_OVERLAY_RUN") == "1":
        watch(os.path.dirname(here))
    run_next()


def watch(package: str) -> None:
    """Wait for torch, with the very torch_overlay that this file lies in, wherever the program would find another."""
    # Our folder's parent is on the path for these imports only: a checkout, say, has more in it than the package.
    parent = os.path.dirname(package)
    sys.path.insert(0, parent)
    try:
        from torch_overlay.import_hook import AfterImport
    finally:
        sys.path.remove(parent)

    def imported(names):
        arrived.extend(names)
        if "torch" in arrived and AWAITED[1] in sys.modules:
            hook.remove()
            import torch_overlay

            torch_overlay.enable()

    arrived: list[str] = []
    hook = AfterImport(AWAITED, imported)
    hook.install()


def run_next() -> None:
    """Run the next ``sitecustomize`` on the path in our place, if there is one."""
    ours = sys.modules.pop(NAME)
    try:
        __import__(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        sys.modules[NAME] = ours


if __name__ == NAME:
    start()
