"""The command line: each mistake beside its words, what is typed in every way that people write it, a wrong torch."""

import pathlib
import subprocess
import sys

import pytest

import torch_overlay
from torch_overlay import versions
from torch_overlay.__main__ import COMMANDS, main
from torch_overlay.show import typed
from torch_overlay.show.typed import Partial, Replicate, Shard, StridedShard

ROOT = pathlib.Path(__file__).parents[2]
EXPLAIN = "explain --mesh=dp=2,tp=2 --shape=8,8"
MISTAKES = [
    ("explian", "torch_overlay: there is no command 'explian'; did you mean 'explain'? There are run, status,"),
    ("--hepl", "torch_overlay: there is no option '--hepl'; did you mean '--help'?"),
    ("status --strict", "torch_overlay status: there is no option '--strict'; did you mean '--no-strict'?"),
    ("status x", "torch_overlay status: there is no place for 'x'"),
    ("run --no-strickt a.py", "torch_overlay run: there is no option '--no-strickt'; did you mean '--no-strict'?"),
    ("run --lr 3 a.py", "there is no option '--lr'; the program's own come after PROGRAM"),
    ("run -z a.py", "torch_overlay run: there is no option '-z'"),
    ("run", "torch_overlay run: there is no program to run"),
    ("run --set flaten=whole a.py", "There is no option 'flaten'; did you mean 'flatten'? Options: share_groups"),
    (
        "run --set flatten=exiting a.py",
        "'whole', 'existing', not 'exiting'; did you mean 'existing'?",
    ),
    ("run --set =x a.py", "--set is followed by OPTION=VALUE"),
    (f"{EXPLAIN} --axis=a,b R,R R,R", "torch_overlay explain: there is no option '--axis'; did you mean '--axes'?"),
    ("explain --mehs=2,2 R,R R,R", "torch_overlay explain: there is no option '--mehs'; did you mean '--mesh'?"),
    ("explain --mesh=2,2 R,R R,R", "torch_overlay explain: the following arguments are required: --shape"),
    (
        f"{EXPLAIN} --flatten=exsting R,R R,R",
        "--flatten: there is no 'exsting'; did you mean 'existing'? There are",
    ),
    (f"{EXPLAIN} --device=cudda R,R R,R", "--device: there is no 'cudda'; did you mean 'cuda'? There are cuda, cpu,"),
    (f"{EXPLAIN} --dtype=bf61 R,R R,R", "--dtype: torch has no dtype 'bf61'; did you mean 'bf16'?"),
    (f"{EXPLAIN} --dtype=float33 R,R R,R", "--dtype: torch has no dtype 'float33'; did you mean 'float32'?"),
    (
        f"{EXPLAIN} --permute=tp,dpp R,R R,R",
        "the mesh has no axis 'dpp'; did you mean 'dp'? Its axes are dp, tp",
    ),
    (f"{EXPLAIN} --flattened=dp,tpp R,R R,R", "--flattened: the mesh has no axis 'tpp'; did you mean 'tp'?"),
    ("run --set topology=dp=1e9:1 a.py", "There is no option 'topology' any more. Options: share_groups"),
    (f"{EXPLAIN} --axes=a,b R,R R,R", "--mesh dp=2,tp=2 names its axes, so leave out --axes a,b"),
    (
        f"{EXPLAIN} Shrad(0),R R,R",
        "in 'Shrad(0),R' is no placement; did you mean 'Shard(0)'? There are R, S0",
    ),
    (f"{EXPLAIN} Repliacte,R R,R", "is no placement; did you mean 'Replicate()'?"),
    (f"{EXPLAIN} P(mx),R R,R", "is no reduction that torch knows; did you mean 'max'? There are sum, avg"),
    (f"{EXPLAIN} S-3,R R,R", "'S-3,R' shards dim -3 of a tensor with 2 dims"),
    ("draw --mesh=2,4 --name=a,b", "torch_overlay draw: there is no option '--name'"),
    ("draw --mesh=dp=2,4", "each axis has a name or none has, as dp=2,tp=4 or 2,4; got 'dp=2,4'"),
    ("draw --mesh=2,4 --gpus-per-host=x", "torch_overlay draw: --gpus-per-host: needs a whole number, got 'x'"),
    ("draw --degrees=dp_shrad=2", "got 'dp_shrad=2'; did you mean 'dp_shard'?"),
    ("draw --mesh=2 --degrees=tp=2", "--degrees: not allowed with argument --mesh"),
    ("draw", "torch_overlay draw: one of the arguments --mesh --degrees is required"),
    ("demo --trian", "torch_overlay demo: there is no option '--trian'; did you mean '--train'?"),
]


def test_each_mistake_is_told_in_a_line_before_torch_is_imported():
    """All of them in one process that has no torch, as a command line does."""
    code = "import sys; from torch_overlay.__main__ import main\n"
    code += "for line in sys.stdin: print(main(line.split()), 'torch' in sys.modules, file=sys.stderr)"
    lines = "".join(f"{arguments}\n" for arguments, _ in MISTAKES)
    done = subprocess.run(
        [sys.executable, "-c", code], input=lines, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    said = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout == "" and len(said) == 2 * len(MISTAKES), done.stderr
    for (arguments, words), line, after in zip(MISTAKES, said[::2], said[1::2]):
        assert words in line and line.startswith("torch_overlay"), (arguments, line)
        assert after == "2 False", (arguments, after)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_version_everywhere(name, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m torch_overlay {name} ") and "--version" in text
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert main(["help", name]) == 0 and capsys.readouterr().out == text
    assert main([name, "--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"torch_overlay {torch_overlay.__version__}, torch ") and said.count("\n") == 1


def test_the_whole_lists_its_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.partition("commands:\n")[2].splitlines()[: len(COMMANDS)]] == list(
        COMMANDS
    )
    assert main([]) == 2 and capsys.readouterr().err == text
    assert main(["--version"]) == 0


def test_two_dashes_are_no_argument(capsys):
    for words in (["draw", "--mesh=2", "--"], ["--", "draw", "--mesh=2"], ["draw", "--mesh=2"]):
        assert main(words) == 0, words
    out = capsys.readouterr().out
    assert out == 3 * out[: len(out) // 3]


R, P = Replicate(), Partial()
SPELLINGS = [
    ("R,S0,P", (R, Shard(0), P)),
    ("r, s0, p", (R, Shard(0), P)),
    ("Replicate(),Shard(0),Partial()", (R, Shard(0), P)),
    ("Replicate, Shard(dim=0), Partial(sum)", (R, Shard(0), P)),
    ("[Replicate(), S(0), P(sum)]", (R, Shard(0), P)),
    ("(Replicate(), Shard(0), Partial('sum'),)", (R, Shard(0), P)),
    ("R·S0·P", (R, Shard(0), P)),
    ('P(avg),Partial("max"),Partial(reduce_op=min)', (Partial("avg"), Partial("max"), Partial("min"))),
    ("S-1,Shard(-2),s-3", (Shard(2), Shard(1), Shard(0))),
    ("_S0(2),_StridedShard(0, 2),_S(0, 2)", 3 * (StridedShard(0, 2),)),
    ("_StridedShard(dim=1, sf=4), _StridedShard(dim=1, split_factor=4), _S-2(4)", 3 * (StridedShard(1, 4),)),
]


@pytest.mark.parametrize("text, meant", SPELLINGS)
def test_placements_as_people_type_them(text, meant):
    assert typed.placements(text, 3, ndim=3) == meant


def test_placements_as_torch_prints_them():
    tensor = pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor.placement_types import _StridedShard

    torchs = (tensor.Shard(1), tensor.Replicate(), tensor.Partial("max"), _StridedShard(0, split_factor=2))
    ours = (Shard(1), R, Partial("max"), StridedShard(0, 2))
    for text in (str(torchs), str(list(torchs)), ",".join(map(str, torchs))):
        assert typed.placements(text, 4) == ours, text


@pytest.mark.parametrize(
    "text, axes",
    [("2,4", "dp,tp"), ("2x4", "dp,tp"), ("2 x 4", "dp,tp"), ("[2, 4]", "dp,tp"), ("dp=2,tp=4", None)]
    + [("dp=2xtp=4", None), ("dp=2 x tp=4", None), ("dp = 2, tp = 4", None)],
)
def test_meshes_as_people_type_them(text, axes):
    assert typed.mesh(text, axes, "tp,0") == ((2, 4), ("dp", "tp"), (1, 0))


def test_names_may_have_an_x():
    assert typed.mesh("ctx=2,x=4", None, None)[:2] == ((2, 4), ("ctx", "x"))


def test_every_dtype_is_known():
    torch = pytest.importorskip("torch")
    from torch_overlay.commands.shown import DTYPES, SHORT, dtype_name

    torchs = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    assert torchs <= set(DTYPES.split()) and set(SHORT.values()) <= torchs
    assert dtype_name("torch.float32") == "float32"


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


def test_no_strict_goes_on(torch_of, capsys, monkeypatch):
    torch_of("2.8.0", file="__init__.py")
    assert main(["draw", "--mesh=2"]) == 2 and main(["draw", "--mesh=2", "--no-strict"]) == 0
    monkeypatch.setenv("TORCH_OVERLAY_STRICT", "off")
    assert main(["draw", "--mesh=2"]) == 0
    assert main(["--version"]) == 0 and ", torch 2.8.0, " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "explain", "draw"])
def test_without_torch(command, capsys, monkeypatch):
    monkeypatch.setattr(versions, "found", lambda: None)
    assert main([command, *JOBS[command]]) == (0 if command == "draw" else 2)
    told = f"torch isn't installed for this Python; torch_overlay supports torch {versions.SUPPORTED[0]}, "
    assert (told in capsys.readouterr().err) == (command != "draw")


def test_status_is_six_lines_and_all_of_it_behind_a_flag(capsys, monkeypatch):
    pytest.importorskip("torch")
    import torch_overlay
    from torch_overlay import report

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(report, "COUNTERS", ())  # other tests of this process redistribute
    try:
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["status", "--all"]) == 0
        everything = capsys.readouterr().out.splitlines()
    finally:
        torch_overlay.disable()
    assert len(lines) == 6 and max(map(len, lines)) <= 80
    assert everything[0] == lines[0] and {"patches", "counts", "options"} <= set(everything)


def test_found_is_the_torch_that_is_imported():
    torch = pytest.importorskip("torch")
    assert versions.found().text == torch.__version__
