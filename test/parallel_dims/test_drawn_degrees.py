"""`draw --degrees`: all meshes of a run as text to the letter, as pictures by what is in them, against the twin."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest

import torch_overlay
from dims_twin import RECIPE, Twin, all_degrees, fake_world, overlay
from torch_overlay.__main__ import main
from torch_overlay.parallel_dims import ParallelDims
from torch_overlay.show.drawing import of_degrees
from torch_overlay.show.pictures import INK, group_color
from torch_overlay.show.typed import degrees as parse
from width import NIGHTLY

ROOT = Path(__file__).parents[2]
RUNS = {
    "8": "dp_shard=2,cp=2,tp=2,ep=4",
    "64": "pp=2,dp_replicate=2,dp_shard=4,cp=2,tp=2,ep=8",
    "512": "pp=4,dp_replicate=2,dp_shard=8,cp=2,tp=4,ep=16,etp=2",
}


def drawn(degrees, gpus_per_host=8):
    return str(torch_overlay.draw(of_degrees(parse(degrees, None)), gpus_per_host=gpus_per_host))


class TestText(expecttest.TestCase):
    def test_two_hosts(self):
        self.assertExpectedInline(
            drawn("pp=2,dp_shard=4,tp=2,ep=4"),
            """\
pp=2 dp_shard=4 tp=2 ep=4: 16 ranks on 2 hosts of 8

world   world=16
dense   pp=2 x dp_replicate=1 x fsdp=4 x tp=2
sparse  pp=2 x dp_replicate=1 x efsdp=2 x ep=4 x etp=1
data    pp=2 x batch=4 x cp=1 x tp=2
loss    loss=4

axis                  size  groups  reaches           the groups' ranks
world                   16       1  over 2 hosts      0-15
pp                       2       8  over 2 hosts      0, 8 | 1, 9 | 2, 10 | ...
dp_replicate = etp =     1      16  no communication  0 | 1 | 2 | 3 | 4 | ...
  cp
fsdp = batch = loss      4       4  inside a host     0-6 by 2 | 1-7 by 2 | ...
tp                       2       8  inside a host     0, 1 | 2, 3 | 4, 5 | ...
efsdp                    2       8  inside a host     0, 4 | 1, 5 | 2, 6 | ...
ep                       4       4  inside a host     0-3 | 4-7 | 8-11 | 12-15

ranks  pp        fsdp      tp        efsdp     ep
0-7    abcdefgh  abababab  aabbccdd  abcdabcd  aaaabbbb
8-15   abcdefgh  cdcdcdcd  eeffgghh  efghefgh  ccccdddd
a row a host, a letter a rank; ranks of one group have the same letter""",
        )

    def test_hosts_of_four(self):
        self.assertExpectedInline(
            drawn("dp_shard=2,cp=2,tp=2,ep=4", gpus_per_host=4),
            """\
dp_shard=2 cp=2 tp=2 ep=4: 8 ranks on 2 hosts of 4

world   world=8
dense   pp=1 x dp_replicate=1 x fsdp=4 x tp=2
sparse  pp=1 x dp_replicate=1 x efsdp=2 x ep=4 x etp=1
data    pp=1 x batch=2 x cp=2 x tp=2
loss    loss=4

axis                 size  groups  reaches           the groups' ranks
world                   8       1  over 2 hosts      0-7
pp = dp_replicate =     1       8  no communication  0 | 1 | 2 | 3 | 4 | 5 | ...
  etp
fsdp = loss             4       2  over 2 hosts      0-6 by 2 | 1-7 by 2
tp                      2       4  inside a host     0, 1 | 2, 3 | 4, 5 | 6, 7
efsdp = batch           2       4  over 2 hosts      0, 4 | 1, 5 | 2, 6 | 3, 7
ep                      4       2  inside a host     0-3 | 4-7
cp                      2       4  inside a host     0, 2 | 1, 3 | 4, 6 | 5, 7

ranks  fsdp  tp    efsdp  ep    cp
0-3    abab  aabb  abcd   aaaa  abab
4-7    abab  ccdd  abcd   bbbb  cdcd
a row a host, a letter a rank; ranks of one group have the same letter""",
        )

    def test_only_the_world(self):
        """Nothing but one axis: it is shown, though it tells no rank from another."""
        self.assertExpectedInline(
            drawn("dp_shard=4,ep=4", gpus_per_host=2),
            """\
dp_shard=4 ep=4: 4 ranks on 2 hosts of 2

world   world=4
dense   pp=1 x dp_replicate=1 x fsdp=4 x tp=1
sparse  pp=1 x dp_replicate=1 x efsdp=1 x ep=4 x etp=1
data    pp=1 x batch=4 x cp=1 x tp=1
loss    loss=4

axis                   size  groups  reaches           the groups' ranks
world = fsdp = ep =       4       1  over 2 hosts      0-3
  batch = loss
pp = dp_replicate =       1       4  no communication  0 | 1 | 2 | 3
  tp = efsdp = etp = cp

ranks  world
0, 1   aa
2, 3   aa
a row a host, a letter a rank; ranks of one group have the same letter""",
        )

    def test_512_ranks(self):
        text = drawn(RUNS["512"])
        self.assertExpectedInline(
            "\n".join(text.splitlines()[:24] + text.splitlines()[-2:]),
            """\
pp=4 dp_replicate=2 dp_shard=8 cp=2 tp=4 ep=16 etp=2: 512 ranks on 64 hosts of 8

world   world=512
dense   pp=4 x dp_replicate=2 x fsdp=16 x tp=4
sparse  pp=4 x dp_replicate=2 x efsdp=2 x ep=16 x etp=2
data    pp=4 x batch=16 x cp=2 x tp=4
loss    loss=32

axis          size  groups  reaches        the groups' ranks
world          512       1  over 64 hosts  0-511
pp               4     128  over 4 hosts   0-384 by 128 | 1-385 by 128 | ...
dp_replicate     2     256  over 2 hosts   0, 64 | 1, 65 | 2, 66 | 3, 67 | ...
fsdp            16      32  over 8 hosts   0-60 by 4 | 1-61 by 4 | ...
tp               4     128  inside a host  0-3 | 4-7 | 8-11 | 12-15 | ...
efsdp            2     256  over 2 hosts   0, 32 | 1, 33 | 2, 34 | 3, 35 | ...
ep              16      32  over 4 hosts   0-30 by 2 | 1-31 by 2 | ...
etp              2     256  inside a host  0, 1 | 2, 3 | 4, 5 | 6, 7 | ...
batch           16      32  over 16 hosts  0-120 by 8 | 1-121 by 8 | ...
cp               2     256  inside a host  0, 4 | 1, 5 | 2, 6 | 3, 7 | ...
loss            32      16  over 16 hosts  0-124 by 4 | 1-125 by 4 | ...

ranks    pp        dp_replicate  fsdp      tp        efsdp     ep
0-7      abcdefgh  abcdefgh      abcdabcd  aaaabbbb  abcdefgh  abababab
8-15     ijklmnop  ijklmnop      abcdabcd  ccccdddd  ijklmnop  abababab
a row a host, a letter a rank; ranks of one group have the same letter; after 62
groups the letters start again""",
        )


@pytest.mark.parametrize("size", [8, 24])
def test_groups_are_the_twins(size):
    """Every axis of every mesh is there by its name, once, with the groups that nested loops give."""
    for degrees in all_degrees(size):
        shown, twin = of_degrees(ParallelDims(**degrees)), Twin(**degrees)
        by_name = {name: axis for axis in shown.axes for name in axis.label.split(" = ")}
        assert sorted(by_name) == sorted({axis for _, axis in twin.axes()})
        assert len(by_name) == sum(axis.label.count(" = ") + 1 for axis in shown.axes)
        assert len({frozenset(axis.groups) for axis in shown.axes}) == len(shown.axes)
        for mesh, axis in twin.axes():
            assert sorted(by_name[axis].groups) == sorted(twin.groups(mesh, axis))


@pytest.mark.parametrize("run", [*RUNS][: None if NIGHTLY else 2])  # large ones by day: those of explain's
def test_picture_shows_each_group_in_its_colour(run, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    numpy = pytest.importorskip("numpy")
    shown = of_degrees(parse(RUNS[run], None))
    assert len(shown.ranks) == int(run)
    torch_overlay.draw(shown, str(tmp_path / "run.png"))
    pixels = (image.imread(tmp_path / "run.png")[..., :3] * 255).round().astype(int)
    assert min(pixels.shape[:2]) >= 500 and max(pixels.shape[:2]) <= 4000
    packed, counts = numpy.unique(pixels @ (1 << 16, 1 << 8, 1), return_counts=True)
    packed, counts = packed[counts > 20], counts[counts > 20]  # the others are rims and letters
    colors = numpy.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)

    def seen(color):
        return counts[abs(colors - [255 * value for value in color]).max(axis=1) <= 1].sum()

    panels = shown.telling()
    groups = range(1, max(len(axis.groups) for axis in panels))
    assert [number for number in groups if seen(group_color(number)) < 20] == []
    box = sum(seen(group_color(number)) for number in groups) / sum(int(run) - axis.size for axis in panels)
    ink = [int(INK[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert seen(ink) > 0.7 * box * sum(axis.size for axis in panels)  # rank 0's group is dark in every panel


def test_picture_has_a_panel_of_all_ranks_for_each_axis(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["draw", "--degrees", RUNS["8"], "--out", str(tmp_path / "run.svg")]) == 0
    said = re.findall("<!-- (.+?) -->", (tmp_path / "run.svg").read_text())  # each text of the picture
    panels = ["fsdp = loss", "tp", "efsdp = batch", "ep", "cp"]
    assert [text for text in said if text in panels] == panels
    assert all(said.count(str(rank)) == len(panels) for rank in range(8))
    assert {"one group of all ranks: world", "every rank by itself: pp = dp_replicate = etp"} <= set(said)
    assert "data    pp=1 x batch=2 x cp=2 x tp=2" in said


def test_the_pages_command_makes_the_pages_picture(tmp_path, monkeypatch, capsys):
    """As seen, not to the byte: letters differ a little from one matplotlib to the next, and more before 3.11 (the last
    for Python 3.10 is 3.10)."""
    version = pytest.importorskip("matplotlib").__version_info__
    image = pytest.importorskip("matplotlib.image")
    page = (ROOT / "docs" / "parallel_dims.md").read_text()
    (link,) = re.findall(r"!\[.+?\]\((.+?)\)", page)
    (command,) = re.findall(r"^python -m torch_overlay draw (.+)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / link).parent.mkdir(parents=True)
    assert main(["draw", *command.split()]) == 0
    theirs, ours = image.imread(ROOT / "docs" / link), image.imread(tmp_path / "docs" / link)
    assert theirs.shape == ours.shape
    assert (abs(theirs - ours).max(axis=2) > 0.1).mean() < (0.02 if version >= (3, 11) else 0.08)
    assert (ROOT / "docs" / link).stat().st_size < 100_000


def test_meshes_that_were_built_are_drawn_as_their_degrees():
    with overlay(True), fake_world(37, 64):
        assert str(torch_overlay.draw(RECIPE.build("cpu"))) == drawn(RUNS["64"])


def test_degrees_as_they_are_typed():
    assert parse("dp_shard=4, tp=2 ,ep=4", None) == ParallelDims(dp_shard=4, tp=2, ep=4)
    assert parse("tp=2", None) == ParallelDims(dp_shard=1, tp=2)
    assert parse("tp=2", 8) == ParallelDims(dp_shard=4, tp=2)
    assert parse("tp=2,dp_shard=4,ep=-1", None) == ParallelDims(dp_shard=4, tp=2, ep=8)
    assert parse("dp_shard=2,pp=-1", 8) == ParallelDims(pp=4, dp_shard=2)


BAD = [
    ("--degrees pp", "needed degrees as pp=2,tp=4, out of pp, dp_replicate, dp_shard, cp, tp, ep, etp; got 'pp'"),
    ("--degrees dp=2", "out of pp, dp_replicate, dp_shard, cp, tp, ep, etp; got 'dp=2'"),
    ("--degrees tp=2,tp=4", "--degrees names tp twice: 'tp=2,tp=4'"),
    ("--degrees tp=x", "--degrees: tp needs a number of ranks, got 'x'"),
    ("--degrees tp=0", "tp must be a number of ranks from 1 on, or -1 for what is left; got 0"),
    ("--degrees dp_shard=-1,tp=2", "what -1 stands for is known with --ranks, how many ranks there are"),
    ("--degrees tp=2,ep=3", "ep * etp must divide dp_shard * cp * tp (2); got 3 * 1 = 3. Would fit: ep out of 1, 2"),
    ("--degrees tp=3 --ranks 8", "got 1 * 1 * 1 * 3 = 3. Would fit: tp out of 1, 2, 4, 8"),
    ("--degrees tp=2 --axes a", "--axes and --permute are for --mesh"),
    ("--mesh 2 --ranks 2", "--ranks is for --degrees"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_told_in_a_line(arguments, message, capsys):
    assert main(["draw", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_overlay draw: ") and message in error and error.count("\n") == 1


def test_command_draws_and_needs_no_torch(tmp_path):
    code = "import sys; from torch_overlay.__main__ import main; code = main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules; sys.exit(code)"
    out = ["--out", str(tmp_path / "run.png")] if importlib.util.find_spec("matplotlib") else []
    command = [sys.executable, "-c", code, "draw", "--degrees", RUNS["8"], "--gpus-per-host", "4", *out]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dp_shard=2 cp=2 tp=2 ep=4: 8 ranks on 2 hosts of 4\n")
    assert not out or (tmp_path / "run.png").stat().st_size > 5_000
