"""`python -m torch_overlay`: real processes, and the ones that they start."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import zipfile

import pytest

from torch_overlay import versions
from torch_overlay.commands import run

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path):
    """Run ``python [flags] -m torch_overlay`` in a folder of its own; the finished process, its output as text."""

    def start(*arguments, files=(), flags=(), path=(ROOT,), stdin=None, **environ):
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_OVERLAY_")}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", **environ}
        python = [sys.executable, *flags, "-m", "torch_overlay", *map(str, arguments)]
        how = {"text": True, "capture_output": True, "timeout": 240, "input": stdin}
        return subprocess.run(python, cwd=tmp_path, env=environment, **how)

    return start


ON = "import torch, torch_overlay; print('on' if torch_overlay.is_enabled() else 'off')\n"
# A torch that is imported at once, for tests of which process is under the overlay; with --no-strict, that's allowed.
FAKE_TORCH = {
    "torch/__init__.py": "__version__ = '2.99.0'\nfrom . import distributed\n",
    "torch/distributed/__init__.py": "from . import device_mesh\n",
    "torch/distributed/device_mesh.py": "class DeviceMesh: pass\n",
}


def test_a_script_sees_what_plain_python_would_show_it(command, tmp_path):
    script = """
        import sys, __main__
        print(sys.argv, sys.path[0], __name__, __file__, __spec__, __main__.__dict__ is globals())
        print([f for f in sys.path if "startup" in f], sys.flags.optimize, "torch" in sys.modules)
        sys.exit(7)
        """
    done = command("run", "folder/script.py", "a", "-m", "--set", files={"folder/script.py": script}, flags=["-O"])
    plain = [sys.executable, "-O", "folder/script.py", "a", "-m", "--set"]
    assert done.returncode == 7 and done.stderr == ""
    assert done.stdout == subprocess.run(plain, cwd=tmp_path, text=True, capture_output=True).stdout
    assert done.stdout.count("\n") == 2


def test_modules_and_code_run_too(command):
    files = {"mod.py": "import sys; print(sys.argv[1:], __name__)"}
    assert command("run", "-m", "mod", "x", files=files).stdout == "['x'] __main__\n"
    code = ON + "import sys; print(sys.argv, torch_overlay.options().flatten)"
    done = command("run", "--set", "flatten=existing", "-c", code, "y")
    assert done.stdout == "on\n['-c', 'y'] existing\n", done.stderr


def test_who_asks_before_torch_is_imported_is_told_the_same(command):
    code = "import sys, torch_overlay; print(torch_overlay.is_enabled(), 'torch' in sys.modules); import torch; "
    code += "print(torch_overlay.is_enabled()); torch_overlay.disable(); print(torch_overlay.is_enabled())"
    done = command("run", "-c", code)
    assert done.stdout == "True False\nTrue\nFalse\n", done.stderr


def test_children_of_every_kind_are_under_it(command, tmp_path):
    script = f"""
        import multiprocessing, os, subprocess, sys

        def child(where):
            {ON.strip().replace("print(", "print(where, ")}
            sys.stdout.flush()

        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                process = multiprocessing.get_context(method).Process(target=child, args=(method,))
                process.start()
                process.join()
            subprocess.run([sys.executable, "-c", {ON!r}], check=True, cwd="/")
            {ON.strip()}
        """
    done = command("run", "--no-strict", "script.py", files={"script.py": script, **FAKE_TORCH}, path=(ROOT, tmp_path))
    assert " ".join(done.stdout.split()) == "spawn on fork on forkserver on on on", done.stderr


def test_torchrun_workers_are_under_it(command):
    """And rank 0 reports, not torchrun itself, even where the node has a RANK of its own."""
    script = """
        import os, torch, torch_overlay
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        value = torch.tensor([float(mesh.get_rank() + 1)])
        torch.distributed.all_reduce(value, group=mesh.get_group())
        text = f"{mesh.get_rank()} {torch_overlay.is_enabled()} {value.item()}"
        with open(f"rank{mesh.get_rank()}", "w") as file:
            file.write(text)
        torch.distributed.barrier()
        import atexit
        atexit._run_exitfuncs()  # the report
        os._exit(0)  # torch's own teardown aborts a worker now and then, on stock as well
        """
    flags = ["--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    program = ["-m", "torch.distributed.run", *flags, "script.py"]
    done = command("run", "--report", *program, files={"script.py": script}, RANK="0")
    assert done.returncode == 0 and done.stderr.count("torch_overlay is on (torch ") == 1, done.stderr
    check = command("run", "-c", "print(open('rank0').read(), open('rank1').read())")
    assert check.stdout == "0 True 3.0 1 True 3.0\n"


def test_a_sitecustomize_that_was_there_still_runs(command, tmp_path):
    files = {"site/sitecustomize.py": "print('theirs', __name__)"}
    code = "import sys; print(sys.modules['sitecustomize'].__file__)"
    done = command("run", "-c", code, files=files, path=(ROOT, tmp_path / "site"))
    theirs = "theirs sitecustomize\n"
    assert done.stdout == 2 * theirs + f"{tmp_path / 'site' / 'sitecustomize.py'}\n", done.stderr


def test_a_refusal_stops_the_program_and_no_strict_lets_it_run(command):
    done = command("run", "script.py", files={"script.py": ON, **FAKE_TORCH})
    refusal = f"torch_overlay run: torch 2.99.0 isn't supported; torch_overlay supports torch {versions.SUPPORTED[0]}, "
    assert done.returncode == 2 and done.stderr.startswith(refusal) and done.stderr.count("\n") == 1, done.stderr
    done = command("run", "--no-strict", "script.py")
    assert done.stdout == "on\n", done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no program to run"),
        ("--", "no program to run"),
        ("-m", "-m is followed by a module"),
        ("-c", "-c is followed by code"),
        ("-u a.py", "-u"),
        ("--unknown=3 a.py", "--unknown$"),
        ("--set flatten", "--set is followed by OPTION=VALUE"),
        ("--set flatten=x -c 1", "flatten is one of"),
    ],
)
def test_what_cannot_be_read_is_said(words, message):
    with pytest.raises(ValueError, match=message):
        run.parse(words.split())


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("a.py -u -m", "a.py -u -m"),
        ("-m a -x", "-m a -x"),
        ("-c pass a", "-c pass a"),
        ("- a", "- a"),
        ("-- a.py b", "a.py b"),
        ("-- -a.py", "-- -a.py"),
        ("-- - a", "- a"),
        ("--no-strict --set flatten=whole a.py --set", "a.py --set"),
    ],
)
def test_our_flags_end_where_the_program_begins(words, program):
    assert run.parse(words.split()).program == program.split()


def test_options_become_settings():
    asked = run.parse(["--no-strict", "--set", "flatten=existing", "--report", "a.py"])
    assert asked.variables == {
        "TORCH_OVERLAY_STRICT": "off",
        "TORCH_OVERLAY_FLATTEN": "existing",
        "TORCH_OVERLAY_RUN": f"report:{os.getpid()}",
    }
    assert run.parse(["--help"]).help and run.parse(["-h", "a.py"]).help and not run.parse(["a.py", "-h"]).help


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, ""),
        ("", ""),
        (":", "::"),
        ("a", ":a"),
        (":a", "::a"),
        ("a::b:", ":a::b:"),
        ("{ours}", ""),
        ("{ours}::a", "::a"),
    ],
)
def test_empty_entries_of_the_path_stay(given, found):
    """An empty one is the current folder; an empty path is none; our folder stands there once."""
    given = {} if given is None else {"PYTHONPATH": given.replace(":", os.pathsep).format(ours=run.STARTUP)}
    environ = run.environment({**given, "X": "1"}, {"Y": "2"})
    assert environ["PYTHONPATH"] == run.STARTUP + found.replace(":", os.pathsep)
    assert (environ["X"], environ["Y"], environ["TORCH_OVERLAY_RUN"]) == ("1", "2", "1")


def test_what_lies_there_is_a_program_or_not(tmp_path, monkeypatch):
    """A folder or zip file needs a main module; without one, a command of that name on PATH is meant."""
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "main", "env"):
        (tmp_path / name).mkdir()
    (tmp_path / "main" / "__main__.py").write_text("")
    (tmp_path / "a.txt").write_text("")
    for name, inside in (("main.pyz", "__main__.py"), ("other.zip", "other.py")):
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr(inside, "")
    for name in ("main", "main.pyz", "a.txt"):
        assert run.command_of([name, "x"])[-2:] == [name, "x"]
    assert run.command_of(["env", "x"]) == [shutil.which("env"), "x"]
    for name, words in (
        ("plain", "folder 'plain' has no __main__.py and no such command"),
        ("other.zip", "zip file 'other.zip' has no __main__.py"),
        ("nothing", "no file 'nothing' and no such command on PATH or beside "),
    ):
        with pytest.raises(ValueError, match=words):
            run.command_of([name])


@pytest.fixture
def startup():
    """sitecustomize.py as a module, not started."""
    spec = importlib.util.spec_from_file_location("startup", os.path.join(run.STARTUP, "sitecustomize.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("switch", "rank", "torchrun", "reports", "left"),
    [
        ("1", None, False, False, "1"),
        ("1", "0", True, False, "1"),
        ("report:7", None, False, True, "report:7"),  # the program; its workers may come
        ("report:8", None, False, False, "report:8"),  # what it starts
        ("report:8", "0", True, True, "1"),
        ("report:8", "1", True, False, "report:8"),
        ("report:7", "0", False, True, "claimed"),  # launched by something like srun; or a node's own rank,
        ("claimed", "0", True, True, "1"),  # and then torchrun's
        ("claimed", "0", False, False, "claimed"),
        ("claimed", None, False, False, "claimed"),
        ("report:7", "3", False, False, "report:7"),
    ],
)
def test_one_process_reports(startup, switch, rank, torchrun, reports, left):
    environ = {"TORCH_OVERLAY_RUN": switch}
    environ |= {"RANK": rank} if rank else {}
    environ |= {"TORCHELASTIC_RUN_ID": "x"} if torchrun else {}
    assert startup.reports(environ, 7, 1) == reports
    assert environ["TORCH_OVERLAY_RUN"] == left


def test_the_report_comes_from_the_program(command, tmp_path):
    """Once, from its own process, on standard error; a worker that imports torch is silent."""
    script = """
        import multiprocessing, subprocess, sys, torch

        if __name__ == "__main__":
            worker = multiprocessing.get_context("spawn").Process(target=print, args=("worker",))
            worker.start(), worker.join()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            print("end", flush=True)
        """
    files, path = {"script.py": script, **FAKE_TORCH}, (ROOT, tmp_path)
    done = command("run", "--report", "--no-strict", "script.py", flags=["-u"], files=files, path=path)
    assert done.stdout == "worker\nend\n" and done.stderr.count("torch_overlay is on (torch ") == 1, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise KeyError(3)", 1)])
def test_the_report_comes_however_the_program_ends(command, tmp_path, end, status):
    code = f"import sys, torch; {end}"
    done = command("run", "--report", "--no-strict", "-c", code, files=FAKE_TORCH, path=(ROOT, tmp_path))
    assert done.returncode == status and done.stderr.count("torch_overlay is on (torch ") == 1, done.stderr


def test_a_program_from_standard_input(command):
    """``-``, with -X and -W, and the current folder through an empty entry of PYTHONPATH."""
    files = {"here.py": "print('here')", "folder/__main__.py": "import sys; print('main', sys.argv)"}
    code = "import sys, os; print(sys.argv, sys.flags.dev_mode, sys.warnoptions[-1]); os.chdir('/'); import here"
    done = command("run", "-", "x", flags=("-X", "dev", "-Wignore"), files=files, path=("", ROOT), stdin=code)
    assert done.stdout == "['-', 'x'] True ignore\nhere\n", done.stderr
    assert command("run", "folder", "x").stdout == "main ['folder', 'x']\n"
    done = command("run", "--help")
    assert done.returncode == 0 and "PROGRAM is one of" in done.stdout


def test_an_environment_that_would_be_ignored_is_refused(command):
    done = command("run", "-c", "", TORCH_OVERLAY_FLATTEN="cheap")
    assert done.returncode == 2 and "flatten is one of" in done.stderr
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from torch_overlay.__main__ import main; "
    code += "sys.exit(main(['run', '-c', '']))"
    done = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "-E, -I or -S" in done.stderr
