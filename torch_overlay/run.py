"""`python -m torch_overlay run`: an unmodified program, and every Python process that it starts, under the overlay.

The program replaces this process, so that its arguments, path, ``__main__``, signals and exit code are what plain
Python would give it. What turns the overlay on is in the environment: ``_startup/sitecustomize.py`` on PYTHONPATH.
"""

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from . import choices

USAGE = """usage: python -m torch_overlay run [--no-strict] [--set OPTION=VALUE]... PROGRAM [ARGUMENT...]

PROGRAM is one of
  FILE        a Python script
  -m MODULE   a module: -m pytest, -m torch.distributed.run
  -c CODE     code
  COMMAND     a command on PATH that starts Python: torchrun, accelerate

The overlay is on in every Python process that the program starts, from the moment torch is imported. It can't reach
processes that ignore the environment (python -E, -I or -S, env -i) or get another PYTHONPATH.

  --no-strict          leave out patches whose targets aren't recognised, instead of refusing to start
  --set OPTION=VALUE   an option, as in TORCH_OVERLAY_<OPTION>; `status` lists them
"""
STARTUP = str(pathlib.Path(__file__).parent / "_startup")


def main(argv: Sequence[str]) -> int:
    """Run it; returns only where there is nothing to run or the platform can't replace a process."""
    try:
        settings, program = parse(argv)
        command = command_of(program)
        environ = environment(os.environ, settings)
        choices.from_environment(environ)  # a wrong option fails here, not in every process of the job
        choices.strict_from_environment(environ)
    except ValueError as error:
        print(f"torch_overlay run: {error}\n\n{USAGE}", file=sys.stderr, end="")
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(command[0], command, environ)
    return subprocess.call(command, env=environ)


def parse(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(environment variables that our own flags set, the program and its arguments)."""
    settings: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0] in ("--no-strict", "--set"):
        if rest.pop(0) == "--no-strict":
            settings[choices.PREFIX + "STRICT"] = "off"
            continue
        name, equals, value = (rest.pop(0) if rest else "").partition("=")
        choices.choose(choices.DEFAULT, {name: value}) if equals else None
        if not equals:
            raise ValueError("--set is followed by OPTION=VALUE")
        settings[choices.PREFIX + name.upper()] = value
    if not rest:
        raise ValueError("there is no program to run")
    if rest[0] in ("-m", "-c") and len(rest) < 2:
        raise ValueError(f"{rest[0]} is followed by {'a module' if rest[0] == '-m' else 'code'}")
    if rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        raise ValueError(f"unknown flag {rest[0]}")
    return settings, rest


def command_of(program: list[str]) -> list[str]:
    """The command line of the program, with the flags that this Python was started with (-u, -O, -W, -X)."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("this Python was started with -E, -I or -S, so it and its children skip what `run` relies on")
    # What multiprocessing, too, gives to the interpreters that it starts.
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    if program[0] in ("-m", "-c") or os.path.exists(program[0]):
        return python + program
    found = shutil.which(program[0])
    if found is None:
        raise ValueError(f"there is no file {program[0]!r} and no such command on PATH")
    return [found, *program[1:]]


def environment(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of the program: the switch, our folder first on PYTHONPATH, and the options."""
    path = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != STARTUP]
    return {
        **environ,
        **settings,
        choices.PREFIX + "RUN": "1",
        "PYTHONPATH": os.pathsep.join([STARTUP, *path]),
    }
