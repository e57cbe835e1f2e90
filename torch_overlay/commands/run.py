"""`python -m torch_overlay run`: runs an unmodified program under the overlay, and every Python process that it starts.

The program replaces this process, so its arguments, path, ``__main__``, signals and exit code are those that plain
Python gives it. The overlay is turned on through the environment: ``_startup/sitecustomize.py`` is on PYTHONPATH.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence

from .. import choices
from . import version

_PROGRAM = """PROGRAM is one of:

  FILE        a Python script, or a folder or zip file with a __main__.py
  -m MODULE   a module: -m pytest, -m torch.distributed.run
  -c CODE     code
  -           a script from standard input
  COMMAND     a command on PATH, or beside this Python, that starts Python: torchrun, accelerate

Python's own flags stand before -m, and hold for PROGRAM: python -u -m torch_overlay run train.py

The overlay is on in every Python process that the program starts, from the moment torch is imported. It can't reach
processes that ignore the environment (python -E, -I or -S, env -i) or get another PYTHONPATH.

Examples:

  %(prog)s train.py --lr 1e-3
  %(prog)s torchrun --nproc-per-node 4 train.py
  %(prog)s --set flatten=existing --report -m pytest
"""
STARTUP = str(pathlib.Path(__file__).parents[1] / "_startup")
VARIABLE = choices.PREFIX + "RUN"


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what `--help` shows. argparse doesn't read the words: it would take the program's for its own."""
    parser.usage = "%(prog)s [OPTION...] [--] PROGRAM [ARGUMENT...]"
    parser.description = "Run an unmodified program, and every Python process that it starts, under the overlay."
    parser.epilog = _PROGRAM
    parser.add_argument(
        "--no-strict",
        action="store_true",
        help="leave out patches whose targets aren't recognised, instead of refusing to start",
    )
    parser.add_argument(
        "--set", metavar="OPTION=VALUE", help="an option, as in TORCH_OVERLAY_<OPTION>; `status` lists them"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print the status to standard error when rank 0 ends: torchrun's, or else the program itself",
    )


def read(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Read the command line of `run`. Exits with 2 for a wrong one, and with 0 after --help and --version."""
    try:
        line = parse(words)
        if line.help:
            parser.parse_args(["run", "--help"])
        if line.version:
            print(version())
            parser.exit()
        command = command_of(line.program)
        environ = environment(os.environ, line.variables)
        choices.from_environment(environ)  # so that a wrong option fails here, and not in every process of the job
        strict = choices.strict_from_environment(environ)
    except UnknownFlag as error:
        where = "the program's own come after PROGRAM, and Python's before -m torch_overlay"
        parser.exit(2, f"torch_overlay run: there is no option {str(error)!r}; {where}\n")
    except ValueError as error:
        parser.exit(2, f"torch_overlay run: {error}\n")
    return argparse.Namespace(command="run", no_strict=not strict, line=command, environ=environ)


def run(arguments: argparse.Namespace) -> int:
    """Run the program in place of this process. Returns only on platforms that can't replace a process."""
    line, environ = arguments.line, arguments.environ
    sys.stdout.flush()
    sys.stderr.flush()
    # In place of this process, so that signals, the exit code and the parent's process id are the program's own.
    if os.name == "posix":
        os.execve(line[0], line, environ)
    return subprocess.call(line, env=environ)


class UnknownFlag(ValueError):
    """A flag that isn't ours. The text of the error is the flag."""


@dataclasses.dataclass
class CommandLine:
    """A command line that was read.

    Attributes:
        variables: of the environment, that our own flags set.
        program: the program with its arguments. -m, -c or - may be its first word; it is -- before a file whose name
            looks like a flag.
    """

    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    program: list[str] = dataclasses.field(default_factory=list)
    help: bool = False
    version: bool = False


def parse(argv: Sequence[str]) -> CommandLine:
    """Read our flags. They end where the program begins. After --help or --version nothing else is read."""
    line, rest = CommandLine(), list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m", "-c"):
        word = rest.pop(0)
        # As Python: it ends the flags, and a file whose name begins with a dash may follow.
        if word == "--":
            line.program = ["--"] if rest and rest[0].startswith("-") and rest[0] != "-" else []
            break
        _read_flag(line, word, rest)
        if line.help or line.version:
            return line
    line.program += rest
    if not line.program:
        raise ValueError("there is no program to run")
    if line.program in (["-m"], ["-c"]):
        raise ValueError(f"{line.program[0]} is followed by {'a module' if line.program[0] == '-m' else 'code'}")
    return line


def _read_flag(line: CommandLine, word: str, rest: list[str]) -> None:
    """Read a flag into `line`, and take its argument out of `rest`."""
    if word in ("-h", "--help", "--version"):
        line.help, line.version = word != "--version", word == "--version"
    elif word == "--no-strict":
        line.variables[choices.PREFIX + "STRICT"] = "off"
    elif word == "--report":
        # The process that runs the program is this one: see _startup/sitecustomize.py for who reports.
        line.variables[VARIABLE] = f"report:{os.getpid()}"
    elif word == "--set" or word.startswith("--set="):
        rest[:0] = [word[6:]] if word != "--set" else []
        name, equals, value = (rest.pop(0) if rest else "").partition("=")
        if not (name and equals):
            raise ValueError("--set is followed by OPTION=VALUE")
        choices.choose(choices.DEFAULT, {name: value})  # raises for a wrong option, before the program starts
        line.variables[choices.PREFIX + name.upper()] = value
    else:
        raise UnknownFlag(word.partition("=")[0])


def command_of(program: list[str]) -> list[str]:
    """The command line of the program, with the flags that this Python was started with."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("this Python was started with -E, -I or -S, so it and its children skip what `run` relies on")
    # What multiprocessing, too, gives to the interpreters that it starts; and what it leaves out, -u and -i.
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    python += ["-u"] if getattr(sys.__stdout__, "write_through", False) else []
    python += ["-i"] if sys.flags.inspect else []
    if program[0] in ("-m", "-c", "-", "--"):
        return python + program
    # A file wins over a command of the same name, as `python NAME` takes the file.
    missing = _no_program(program[0])
    if missing is None:
        return python + program
    # Beside this Python, too: the environment of `venv/bin/python -m torch_overlay run torchrun` needn't be active.
    beside = os.path.dirname(sys.executable)
    found = shutil.which(program[0]) or (shutil.which(program[0], path=beside) if beside else None)
    if found is None:
        raise ValueError(f"{missing} and no such command on PATH or beside {sys.executable}")
    return [found, *program[1:]]


def _no_program(path: str) -> str | None:
    """Why Python can't run this path, or None if it can: a file, or a folder or zip file with a main module."""
    mains = ("__main__.py", "__main__.pyc")
    if os.path.isdir(path):
        if not any(os.path.exists(os.path.join(path, main)) for main in mains):
            return f"the folder {path!r} has no __main__.py"
    elif not os.path.exists(path):
        return f"there is no file {path!r}"
    elif os.path.isfile(path) and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if not set(mains) & set(archive.namelist()):
                return f"the zip file {path!r} has no __main__.py"
    return None


def environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of the program: ours, our folder first on PYTHONPATH, and the options. An empty entry of
    PYTHONPATH means the current folder, so it stays."""
    # Ours is taken out before it is put first: `run` inside of `run` must not let the folder stand twice.
    former = environ.get("PYTHONPATH", "")
    path = [folder for folder in former.split(os.pathsep) if folder != STARTUP] if former else []
    # `variables` come after ours, which --report sets to another value.
    return {**environ, VARIABLE: "1", **variables, "PYTHONPATH": os.pathsep.join([STARTUP, *path])}
