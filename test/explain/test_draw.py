"""Meshes drawn: as text, as pictures by their colours, and what is said of bad input."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_overlay
from torch_overlay.__main__ import main
from torch_overlay.show.drawing import MeshMap
from torch_overlay.show.typed import laid_out

ROOT = Path(__file__).parents[2]


def test_text_says_where_groups_reach_and_which_ranks_they_have():
    """Axis tp runs slowest, so its groups leave the host."""
    text = str(torch_overlay.draw(MeshMap.of(("dp", "tp"), (4, 2), laid_out((4, 2), (1, 0))), gpus_per_host=4))
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("dp=4 x tp=2: 8 ranks on 2 hosts of 4")
    assert ["dp", "4", "2", "inside", "a", "host", "0-3", "|", "4-7"] in lines
    assert "tp       2       4  over 2 hosts   0, 4 | 1, 5 | 2, 6 | 3, 7" in text
    assert ["0-3", "aaaa", "abcd"] in lines and ["4-7", "bbbb", "abcd"] in lines


@pytest.mark.parametrize("names, sizes", [(("pp", "dp", "tp"), (1, 64, 2)), (("dp", "tp"), (128, 8))])
def test_large_meshes_fit_a_terminal(names, sizes):
    text = str(torch_overlay.draw(MeshMap.of(names, sizes, laid_out(sizes, None))))
    assert max(map(len, text.splitlines())) <= 80 and ("letters start again" in text or "draw a picture" in text)


@pytest.mark.parametrize("order", [None, (2, 0, 1)])
def test_groups_are_those_of_torchs_mesh(order):
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import DeviceMesh

    sizes = (2, 3, 4)
    ranks = torch.tensor(laid_out(sizes, order)).view(sizes)
    for axis, drawn in enumerate(MeshMap.of("abc", sizes, laid_out(sizes, order)).axes):
        expected = ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()
        assert sorted(map(list, drawn.groups)) == sorted(expected)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b", "c"), _init_backend=False, _rank=0)
    of_names = torch_overlay.draw(mesh)
    assert str(of_names) == repr(of_names) == str(torch_overlay.draw(MeshMap.of("abc", sizes, laid_out(sizes, order))))


@pytest.mark.parametrize("sizes", [(2, 4), (2, 4, 8)], ids=["8", "64"])
def test_picture_shows_each_group_in_its_colour(sizes, tmp_path):
    names = ("pp", "dp", "cp", "tp")[-len(sizes) :]
    image = pytest.importorskip("matplotlib.image")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "mesh.png"
    torch_overlay.draw(MeshMap.of(names, sizes, laid_out(sizes, None)), str(path))
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    assert min(pixels.shape[:2]) >= 500 and max(pixels.shape[:2]) <= 4000
    packed, counts = numpy.unique(pixels @ (1 << 16, 1 << 8, 1), return_counts=True)
    colors = numpy.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)
    plain = colors[counts > 20]
    from torch_overlay.show.pictures import group_color

    most = max(numpy.prod(sizes) // size for size in sizes)
    for number in range(1, most):  # the first is dark
        color = numpy.array(group_color(number)) * 255
        assert numpy.abs(plain - color).max(axis=1).min() <= 1, f"no pixel has the colour of group {number}"


def test_command_draws_and_needs_no_torch(tmp_path):
    code = "import sys; from torch_overlay.__main__ import main; code = main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules; sys.exit(code)"
    path = tmp_path / "mesh.png"
    out = ["--out", str(path)] if importlib.util.find_spec("matplotlib") else []
    command = [sys.executable, "-c", code, "draw", "--mesh", "2,4", "--axes", "dp,tp", *out]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dp=2 x tp=4: 8 ranks on 1 host of 8\n")
    assert not out or path.stat().st_size > 5_000


BAD = [
    ("--mesh 2,x", "needed whole numbers, as 2,4 or 2x4, got '2,x'"),
    ("--mesh 2,0", "needed numbers of at least 1, got '2,0'"),
    ("--mesh 2,4 --axes dp", "a mesh of 2 axes needs 2 different names, got 'dp'"),
    ("--mesh 2,4 --gpus-per-host 0", "gpus_per_host must be at least 1, got 0"),
    ("--mesh 2,4 --permute a,q", "--permute: the mesh has no axis 'q'; its axes are a, b"),
    ("--mesh 2,4 --permute a", "an order of 2 axes names each of them once, got (0,)"),
    ("--mesh 64,128 --out never.png", "a picture shows at most 4096 ranks, got 8192"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_told_in_a_line(arguments, message, capsys):
    assert main(["draw", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_overlay draw: ") and message in error and error.count("\n") == 1


def test_no_folder_to_write_to(capsys):
    pytest.importorskip("matplotlib")
    assert main(["draw", "--mesh=2,4", "--out=no/such/folder/x.png"]) == 2
    assert "No such file or directory: 'no/such/folder/x.png'" in capsys.readouterr().err


def test_no_mesh():
    with pytest.raises(TypeError, match=r"draw\(\) needs a DeviceMesh, got int"):
        torch_overlay.draw(3)
