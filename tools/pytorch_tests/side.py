"""`Side`, one of the two ways in which the tests are run: what its processes find in their environment."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping

from torch_overlay import choices
from torch_overlay.commands import run

INSIDE = str(pathlib.Path(__file__).parent / "inside")
# The ranks share the cores; plugins of pytest that happen to be installed have no say; an error ends with its message,
# not with torch's advice on how to repeat it. The caller's environment wins.
DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}


@dataclasses.dataclass(frozen=True)
class Side:
    """A name, and the environment, first folders on PYTHONPATH and command; spawned ranks inherit all but the
    command."""

    name: str
    environment: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    prefix: tuple[str, ...] = (sys.executable,)

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a test process: the caller's without any switch of the overlay, then this side's."""
        kept = {name: value for name, value in base.items() if not name.startswith(choices.PREFIX)}
        before = [folder for folder in kept.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", run.STARTUP)]
        path = [*self.path, INSIDE, *before]
        return {**DEFAULTS, **kept, **dict(self.environment), "PYTHONPATH": os.pathsep.join(path)}

    def command(self, *arguments: str) -> list[str]:
        return [*self.prefix, "-m", "pytest", *arguments]


STOCK = Side("stock")


def overlay() -> Side:
    """Torch under the overlay that this tool lies beside, with the options of the caller's environment."""
    options = {name: value for name, value in os.environ.items() if name.startswith(choices.PREFIX)}
    variables = run.environment({}, options)
    path = variables.pop("PYTHONPATH").split(os.pathsep)
    return Side("overlay", tuple(variables.items()), tuple(path))


def patched(folder: str) -> Side:
    """Another torch, first on the path, without the overlay: ``folder`` holds its ``torch``."""
    if not (pathlib.Path(folder) / "torch" / "__init__.py").exists():
        raise ValueError(f"{folder} holds no torch: --mode patched=FOLDER names the folder that torch/ lies in")
    return Side("patched", path=(str(pathlib.Path(folder).resolve()),))


def of(mode: str) -> Side:
    name, _, folder = mode.partition("=")
    if name == "overlay" and not folder:
        return overlay()
    if name == "patched" and folder:
        return patched(folder)
    raise ValueError(f"--mode is overlay or patched=FOLDER, not {mode!r}")
