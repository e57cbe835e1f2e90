"""The command line: each mistake beside its words, what is typed, a wrong torch."""

import pathlib
import re
import subprocess
import sys

import pytest

import torch_overlay
from torch_overlay import versions
from torch_overlay.__main__ import COMMANDS, main
from torch_overlay.series import PATCHES
from torch_overlay.show import typed

ROOT = pathlib.Path(__file__).parents[2]
EXPLAIN = "explain --mesh=dp=2,tp=2 --shape=8,8"
MISTAKES = [
    ("explian", "invalid choice: 'explian'"),
    ("", "the following arguments are required: COMMAND"),
    ("status --strict", "unrecognized arguments: --strict"),
    ("status x", "unrecognized arguments: x"),
    ("run --no-strickt a.py", "torch_overlay run: there is no option '--no-strickt'; the program's own come after"),
    ("run -u a.py", "there is no option '-u'; the program's own come after PROGRAM, and Python's before -m torch_o"),
    ("run", "torch_overlay run: there is no program to run"),
    ("run --set flaten=whole a.py", "There is no option 'flaten'"),
    ("run --set flatten=crate a.py", "'existing', "),
    ("run --set topology=dp=1e9:1 a.py", "There is no option 'topology'. Options"),
    ("run --set =x a.py", "--set is followed by OPTION=VALUE"),
    ("explain --mesh=2,2 R,R R,R", "the following arguments are required: --shape"),
    (f"{EXPLAIN} --flatten=exsting R,R R,R", "argument --flatten: invalid choice: 'exsting'"),
    (f"{EXPLAIN} --dtype=bf61 R,R R,R", "--dtype: torch has no dtype 'bf61'; needed is one such as bf16"),
    (f"{EXPLAIN} --permute=tp,dpp R,R R,R", "the mesh has no axis 'dpp'; its axes are dp, tp"),
    (f"{EXPLAIN} --axes=a,b R,R R,R", "--mesh dp=2,tp=2 names its axes, so leave out --axes a,b"),
    (f"{EXPLAIN} Shard(0),R R,R", "in 'Shard(0),R' is no placement; there are R, S0"),
    (f"{EXPLAIN} P(mx),R R,R", "is no reduction that torch knows; there are sum, avg"),
    (f"{EXPLAIN} S2,R R,R", "axis 0 shards dim 2 of a tensor with 2 dims"),
    ("draw --mesh=dp=2,4", "each axis has a name or none has, as dp=2,tp=4 or 2,4; got 'dp=2,4'"),
    ("draw --mesh=2,4 --gpus-per-host=x", "argument --gpus-per-host: invalid int value: 'x'"),
    ("draw --degrees=dp_shrad=2", "needed degrees as pp=2,tp=4"),
    ("draw --mesh=2 --degrees=tp=2", "argument --degrees: not allowed with argument --mesh"),
    ("draw", "one of the arguments --mesh --degrees is required"),
    ("demo --train", "unrecognized arguments: --train"),
]


def test_each_mistake_is_told_and_ends_with_2_before_torch_is_imported():
    """All of them in one process that has no torch, as a command line does."""
    code = "import sys; from torch_overlay.__main__ import main\n"
    code += "for line in sys.stdin: print('<end>', main(line.split()), 'torch' in sys.modules, file=sys.stderr)"
    lines = "".join(f"{arguments}\n" for arguments, _ in MISTAKES)
    done = subprocess.run(
        [sys.executable, "-c", code], input=lines, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    said = re.split(r"<end> (.*)\n", done.stderr)
    assert done.returncode == 0 and done.stdout == "" and len(said) == 2 * len(MISTAKES) + 1, done.stderr
    for (arguments, words), text, after in zip(MISTAKES, said[::2], said[1::2]):
        assert words in text, (arguments, text)
        assert after == "2 False", (arguments, after)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_version_everywhere(name, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m torch_overlay {name} ") and "--version" in text
    assert main(["help", name]) == 0 and capsys.readouterr().out == text
    assert main([name, "--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"torch_overlay {torch_overlay.__version__}, torch ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "text, axes",
    [("2,4", "dp,tp"), ("2x4", "dp,tp"), ("2 x 4", "dp,tp"), ("[2, 4]", "dp,tp"), ("dp=2,tp=4", None)]
    + [("dp=2xtp=4", None), ("dp=2 x tp=4", None), ("dp = 2, tp = 4", None)],
)
def test_meshes_as_people_type_them(text, axes):
    assert typed.parse_mesh(text, axes, "tp,0") == ((2, 4), ("dp", "tp"), (0, 2, 4, 6, 1, 3, 5, 7))


def test_every_dtype_is_known():
    torch = pytest.importorskip("torch")
    from torch_overlay.commands.shown import DTYPES, SHORT, dtype_name

    torchs = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    assert torchs <= set(DTYPES.split()) and set(SHORT.values()) <= torchs
    assert dtype_name("torch.float32") == "float32"


def test_status(capsys):
    try:
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["status", "--all"]) == 0
        everything = capsys.readouterr().out.splitlines()
    finally:
        torch_overlay.disable()
    assert lines[0].startswith("This torch is supported. ") and lines[2].startswith("torch_overlay is on (torch ")
    assert everything[:3] == lines[:3] and {"patches", "counts", "options"} <= set(everything)


def test_status_of_another_release(capsys):
    """The rows for some releases, sorted by whether this one gets them, and the branches of the seam."""
    for release in versions.SUPPORTED:
        assert main(["status", "--release", release]) == 0
        told = capsys.readouterr().out
        got, others = told.split("Patches that this release doesn't get:")
        for row in [row for row in PATCHES if row.releases]:
            part = got if row.is_for(versions.parse(release).number) else others
            assert f"(torch {row.releases}), {row.body.removeprefix('torch_overlay.')}" in part
        assert ("to_torch: RELEASE < (2, 13)" in others) == (release in ("2.11.0", "2.12.1"))
    assert main(["status", "--release", "2.9"]) == 2 and "2.11.0" in capsys.readouterr().err


# --- a torch that isn't supported ---

JOBS = {
    "status": [],
    "run": ["-c", "raise SystemExit(5)"],
    "explain": ["--mesh=2", "--shape=8", "R", "S0"],
    "draw": ["--mesh=2"],
    "demo": [],
}


@pytest.fixture
def torch_of(tmp_path, monkeypatch):
    """Another torch comes first on the path, and none is imported yet."""

    def put(version, file="version.py"):
        (tmp_path / "torch").mkdir()
        for name in ("__init__.py", "version.py"):
            (tmp_path / "torch" / name).write_text(f"__version__: str = '{version}'\n" if name == file else "")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.delenv("TORCH_OVERLAY_STRICT", raising=False)

    return put


@pytest.mark.parametrize("version", ["2.8.0", "2.12.0rc1", "2.14.0.dev20260901+cu128", "2.15.0a0+git123", "3.0.0"])
def test_a_wrong_torch_is_told_in_a_line(torch_of, version, capsys):
    torch_of(version)
    for command, words in JOBS.items():
        assert main([command, *words]) == 2
        out, err = capsys.readouterr()
        supported = f"{', '.join(versions.SUPPORTED[:-1])} and {versions.SUPPORTED[-1]}"
        line = f"torch_overlay {command}: torch {version} isn't supported; torch_overlay supports torch {supported}"
        assert out == "" and err.startswith(line) and err.count("\n") == 1
        assert ("--no-strict" in err) == (command != "demo")
    assert "torch" not in sys.modules, "torch is read, not imported"


def test_a_torch_whose_version_has_no_number_is_told_in_a_line(torch_of, capsys):
    torch_of("unknown")
    assert main(["draw", "--mesh=2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "looks like 2.13.0, not 'unknown'" in err and err.count("\n") == 1


def test_no_strict_goes_on(torch_of, capsys, monkeypatch):
    torch_of("2.8.0", file="__init__.py")
    assert main(["draw", "--mesh=2"]) == 2 and main(["draw", "--mesh=2", "--no-strict"]) == 0
    monkeypatch.setenv("TORCH_OVERLAY_STRICT", "off")
    assert main(["draw", "--mesh=2"]) == 0
    assert main(["--version"]) == 0 and ", torch 2.8.0, " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "explain", "draw"])
def test_without_torch(command, capsys, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: None)
    assert main([command, *JOBS[command]]) == (0 if command == "draw" else 2)
    told = f"torch isn't installed for this Python; torch_overlay supports torch {versions.SUPPORTED[0]}, "
    assert (told in capsys.readouterr().err) == (command != "draw")
