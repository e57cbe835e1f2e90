"""`python -m torch_overlay`: real processes, and the ones that they start."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path):
    """Run ``python [flags] -m torch_overlay`` in a folder of its own; the finished process, its output as text."""

    def run(*arguments, files=(), flags=(), path=(ROOT,), **environ):
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_OVERLAY_")}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", **environ}
        python = [sys.executable, *flags, "-m", "torch_overlay", *map(str, arguments)]
        return subprocess.run(python, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240)

    return run


ON = "import torch, torch_overlay; print('on' if torch_overlay.is_enabled() else 'off')\n"


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
    assert command("run", "-c", "import sys; print(sys.argv)", "y").stdout == "['-c', 'y']\n"


def test_the_overlay_is_on_once_torch_is_imported_and_takes_options(command):
    code = ON + "print(torch_overlay.options().flatten, torch_overlay.__file__)"
    done = command("run", "--set", "flatten=existing", "-c", code)
    assert done.stdout == f"on\nexisting {ROOT / 'torch_overlay' / '__init__.py'}\n", done.stderr


def test_children_of_every_kind_are_under_it(command):
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
    done = command("run", "script.py", files={"script.py": script})
    assert " ".join(done.stdout.split()) == "spawn on fork on forkserver on on on", done.stderr


def test_torchrun_workers_are_under_it(command):
    script = """
        import os, torch, torch_overlay
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        value = torch.tensor([float(mesh.get_rank() + 1)])
        torch.distributed.all_reduce(value, group=mesh.get_group())
        text = f"{mesh.get_rank()} {torch_overlay.is_enabled()} {value.item()}"
        open(f"rank{mesh.get_rank()}", "w").write(text)
        torch.distributed.destroy_process_group()
        """
    flags = ["--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = command("run", "-m", "torch.distributed.run", *flags, "script.py", files={"script.py": script})
    assert done.returncode == 0, done.stderr
    check = command("run", "-c", "print(open('rank0').read(), open('rank1').read())")
    assert check.stdout == "0 True 3.0 1 True 3.0\n"


def test_pytest_and_torchs_own_multi_process_tests_are_under_it(command):
    tests = """
        import torch, torch_overlay
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        class TestRanks(MultiProcessTestCase):
            world_size = 2

            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def test_on(self):
                assert torch_overlay.is_enabled()
                assert self.rank in (0, 1)

        def test_on():
            assert torch_overlay.is_enabled()
        """
    done = command("run", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_x.py", files={"test_x.py": tests})
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_sitecustomize_that_was_there_still_runs(command, tmp_path):
    files = {"site/sitecustomize.py": "print('theirs', __name__)"}
    code = "import sys; print(sys.modules['sitecustomize'].__file__)"
    done = command("run", "-c", code, files=files, path=(ROOT, tmp_path / "site"))
    theirs = "theirs sitecustomize\n"
    assert done.stdout == 2 * theirs + f"{tmp_path / 'site' / 'sitecustomize.py'}\n", done.stderr


def test_a_refusal_stops_the_program_and_no_strict_lets_it_run(command):
    fake = "__version__ = '2.99.0'\nfrom . import distributed\n"
    files = {"torch/__init__.py": fake, "torch/distributed/__init__.py": "from . import device_mesh\n"}
    files |= {"torch/distributed/device_mesh.py": "class DeviceMesh: pass\n", "script.py": ON}
    done = command("run", "script.py", files=files)
    assert done.returncode == 1 and "UnknownRelease: torch 2.99.0 isn't one of" in done.stderr, done.stderr
    done = command("run", "--no-strict", "script.py")
    assert done.stdout == "on\n", done.stderr


def test_processes_without_torch_load_next_to_nothing(command):
    ours = "'overlay' in m and not m.startswith('__editable__')"  # an editable install brings a finder of its own
    code = f"import sys; print(*sorted(m for m in sys.modules if {ours}), 'typing' in sys.modules)"
    assert command("run", "-c", code).stdout == "torch_overlay torch_overlay.import_hook False\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "no program to run"),
        (["run", "nothing.py"], "no file 'nothing.py' and no such command"),
        (["run", "-m"], "-m is followed by a module"),
        (["run", "-x", "a.py"], "unknown flag -x"),
        (["run", "--set", "flatten"], "--set is followed by OPTION=VALUE"),
        (["run", "--set", "flatten=x", "-c", ""], "flatten is one of"),
        (["nothing"], "no command 'nothing'"),
        (["status", "x"], "takes no arguments, not x"),
        ([], "usage: python -m torch_overlay COMMAND"),
    ],
)
def test_a_wrong_command_line_says_so(command, arguments, words):
    done = command(*arguments)
    assert done.returncode == 2 and words in done.stdout + done.stderr


def test_an_environment_that_would_be_ignored_is_refused(command):
    done = command("run", "-c", "", TORCH_OVERLAY_COST="cheap")
    assert done.returncode == 2 and "cost is one of" in done.stderr
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from torch_overlay.run import main; sys.exit(main(['-c', '']))"
    )
    done = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "-E, -I or -S" in done.stderr


def test_status_prints_the_table(command):
    done = command("status")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("torch_overlay is on, ") and "\noptions\n  share_groups: on" in done.stdout


def test_a_command_on_the_path_is_found(command):
    done = command("run", "env")
    lines = done.stdout.splitlines()
    assert "TORCH_OVERLAY_RUN=1" in lines
    assert any(line.startswith("PYTHONPATH=" + str(ROOT / "torch_overlay" / "_startup")) for line in lines)
