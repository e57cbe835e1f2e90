"""tools/run_pytorch_tests.py on a small file in the style of PyTorch's tests."""

import json

import pytest
import run_pytorch_tests as tool

from width import NIGHTLY

EXPECTED = """
from pytorch_tests.difference import Expected

EXPECTED = [
    Expected("test_meshes.py::*spawned_process", "meant so"),
    Expected("test_meshes.py::TestMeshes::test_dp", "once it failed"),
]
"""
PLANTED = """
import os, sys

if "torch_overlay" in sys.modules:  # the overlay's own sitecustomize ran before this one
    from torch_overlay.patching.import_hook import AfterImport

    def plant(_):
        bodies = sys.modules["torch_overlay.distributed.device_mesh"]._DeviceMesh
        right = bodies.__getitem__
        bodies.__getitem__ = lambda self, names: self if names == "tp" else right(self, names)

    AfterImport(["torch_overlay.distributed.device_mesh"], plant).install()
"""
MESHES = """
import multiprocessing, unittest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


def tp_size(queue):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    queue.put(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"].ndim)


class TestMeshes(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        self.mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

    def tearDown(self):
        dist.destroy_process_group()

    def test_dp(self):
        self.assertEqual(self.mesh["dp"].ndim, 1)

    def test_tp(self):
        self.assertEqual(self.mesh["tp"].ndim, 1)

    def test_tp_in_a_spawned_process(self):
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=tp_size, args=(queue,))
        process.start()
        self.assertEqual(queue.get(timeout=200), 1)
        process.join()
"""


@pytest.mark.skipif(not NIGHTLY, reason="ten seconds of a tool that runs by itself: only at night")
def test_a_regression_planted_in_the_overlay_breaks_exactly_its_cases(tmp_path, monkeypatch, capsys):
    """A body that answers wrongly for one name, in the tested process and in one that it spawns. An expectation for one
    of both leaves the other a loss, and one that no longer holds is named."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(PLANTED)
    (tmp_path / "test_meshes.py").write_text(MESHES)
    (tmp_path / "expected.py").write_text(EXPECTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "planted"))
    where = ["--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "found.json")]
    code = tool.main([str(tmp_path / "test_meshes.py"), *where, "--expected", str(tmp_path / "expected.py")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["case"].rpartition("::")[2]: (row["verdict"], *row["outcomes"]) for row in found["cases"]} == {
        "test_dp": ("same", "passed", "passed"),
        "test_tp": ("broken", "passed", "failed"),
        "test_tp_in_a_spawned_process": ("broken", "passed", "failed"),
    }
    text = capsys.readouterr().out
    assert code == 1 and "1 test cases are worse than on stock" in text
    assert "test_dp isn't broken any more, but same. Its reason was: once it failed" in text


def test_the_list_of_expectations_can_be_read():
    for entry in tool.load(str(tool.EXPECTED)):
        assert entry.reason and "::" in entry.pattern
        entry.in_force("overlay", tool.versions.running().number)
