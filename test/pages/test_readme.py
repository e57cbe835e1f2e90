"""Each command of README runs: those for the overlay here, those of the tables are benchmarks that there are."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from torch_overlay.__main__ import main
from width import NIGHTLY

ROOT = pathlib.Path(__file__).parents[2]
PATHS = (str(ROOT), "PYTHONPATH"), (str(pathlib.Path(sys.executable).parent), "PATH")  # what comes first
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BASH = "\n".join(re.findall(r"^```bash\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
COMMANDS = [line.partition("  #")[0] for line in BASH.splitlines() if "-m torch_overlay" in line and "venv" not in line]
PROGRAM = "import torch, torch_overlay as o; print(o.is_enabled(), o.options().check_mesh)"


def run(command: str, folder: pathlib.Path) -> str:
    """What it prints; with one rank (test_run.py has torchrun with two) and a program of one line."""
    (folder / "train.py").write_text(PROGRAM)
    settings, _, rest = command.partition("python ")
    rest = re.sub(r"torchrun .*", "torchrun --nproc-per-node 1 train.py", rest)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_OVERLAY_")}
    given = dict(setting.split("=") for setting in settings.split())
    paths = [os.pathsep.join(filter(None, [first, os.environ.get(name)])) for first, name in PATHS]
    environment = {**kept, **given, "PYTHONPATH": paths[0], "PATH": paths[1]}
    words = [sys.executable, *shlex.split(rest)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_has_these_commands():
    words = [shlex.split(command.partition("torch_overlay ")[2])[0] for command in COMMANDS]
    assert words == ["run", "run", "explain", "draw", "status"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command, tmp_path, capsys):
    words = shlex.split(command.partition("torch_overlay ")[2])
    if "=" in command.split()[0] and not NIGHTLY:
        pytest.skip("test_run.py has torchrun with settings in the environment: only at night")
    if words[0] in ("explain", "draw"):  # which change nothing, and so need no process of their own
        assert not main(words)
        said = capsys.readouterr().out
    else:
        said = run(command, tmp_path)
    assert said
    if " run " in command:
        assert re.findall("True|False", said) == ["True", str("TORCH_OVERLAY_CHECK_MESH" in command)], said
