"""Meshes drawn: whose groups are shown, that no torch is needed, and what is said of bad input."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_overlay
from torch_overlay.__main__ import main
from torch_overlay.show import pictures
from torch_overlay.show.drawing import MeshMap
from torch_overlay.show.typed import ranks_in_order

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("order", [None, (2, 0, 1)])
def test_groups_are_those_of_torchs_mesh(order):
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import DeviceMesh

    sizes = (2, 3, 4)
    ranks = torch.tensor(ranks_in_order(sizes, order)).view(sizes)
    for axis, drawn in enumerate(MeshMap.of("abc", sizes, ranks_in_order(sizes, order)).axes):
        expected = ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()
        assert sorted(map(list, drawn.groups)) == sorted(expected)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b", "c"), _init_backend=False, _rank=0)
    of_names = torch_overlay.draw(mesh)
    assert (
        str(of_names)
        == repr(of_names)
        == str(torch_overlay.draw(MeshMap.of("abc", sizes, ranks_in_order(sizes, order))))
    )


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


def test_a_flow_has_rows_for_those_that_send_and_columns_for_those_that_get(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn, draw = [], pictures._matrix
    monkeypatch.setattr(pictures, "_matrix", lambda axes, *what: drawn.append(what) or draw(axes, *what))
    hosts, lines = {0: "a", 1: "a", 4: "b", 5: "c"}, []
    monkeypatch.setattr("matplotlib.axes.Axes.axhline", lambda axes, at, **_: lines.append(("row", at)))
    monkeypatch.setattr("matplotlib.axes.Axes.axvline", lambda axes, at, **_: lines.append(("column", at)))
    pictures.draw_flow((0, 1, 4, 5), {(1, 4): 8, (0, 5): 16, (0, 1): 0}, ["a title", ""], tmp_path / "flow.png", hosts)
    assert lines == [("column", 0.5)], "the receivers 4 and 5 are on two hosts"
    pictures.draw_flow((0, 1), {}, ["nothing"], tmp_path / "none.png")
    assert drawn == [([[0, 16], [8, 0]], [0, 1], [4, 5]), ([[0, 0], [0, 0]], [0, 1], [0, 1])]


BAD = [
    ("--mesh 2,x", "needed whole numbers, as 2,4 or 2x4, got '2,x'"),
    ("--mesh 2,4 --permute a,q", "--permute: the mesh has no axis 'q'; its axes are a, b"),
    ("--mesh 2,4 --permute a", "an order of 2 axes names each of them once, got (0,)"),
    ("--mesh 64,128 --out never.png", "a picture shows at most 4096 ranks, got 8192"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_told_in_a_line(arguments, message, capsys):
    assert main(["draw", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torch_overlay draw: ") and message in error and error.count("\n") == 1
