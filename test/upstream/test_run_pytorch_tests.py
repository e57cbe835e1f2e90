"""tools/run_pytorch_tests.py on small files in the style of PyTorch's: what differs, hangs, dies, comes and goes."""

import json
import pathlib
import textwrap

import pytest
import run_pytorch_tests as tool

# On the other side the switch of `run` is in the environment: enough for files that need no torch.
EVERY_END = """
import os, pathlib, signal, subprocess, time, unittest

OTHER = "TORCH_OVERLAY_RUN" in os.environ
SEEN = pathlib.Path(__file__).with_suffix(".seen")


class TestEnds(unittest.TestCase):
    def setUp(self):
        with open(SEEN, "a") as file:
            file.write(f"{'other' if OTHER else 'stock'} {self._testMethodName}\\n")

    def test_a_passes(self):
        pass

    def test_b_fails(self):
        self.fail("on both sides")

    def test_c_is_broken(self):
        self.assertFalse(OTHER, "what the other side broke")

    def test_d_is_fixed(self):
        self.assertTrue(OTHER)

    def test_f_hangs_there(self):
        if OTHER:  # and so does a process that it started
            SEEN.with_suffix(".pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(600)

    def test_g_dies_there(self):
        if OTHER:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_h_is_flaky_there(self):
        self.assertFalse(OTHER and SEEN.read_text().count("other test_h") == 1)

    def test_i_comes_after_all_that(self):
        pass
"""
VERDICTS = {
    "a_passes": ("same", "passed", "passed"),
    "b_fails": ("still failing", "failed", "failed"),
    "c_is_broken": ("broken", "passed", "failed"),
    "d_is_fixed": ("fixed", "failed", "passed"),
    "f_hangs_there": ("broken", "passed", "timeout"),
    "g_dies_there": ("broken", "passed", "crashed"),
    "h_is_flaky_there": ("flaky", "passed", "failed"),
    "i_comes_after_all_that": ("same", "passed", "passed"),
}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the tool on one file; (exit code, {case: (verdict, outcomes)}, what it printed)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(name, text, *arguments, expected="EXPECTED = []"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        (tmp_path / "expected.py").write_text("from pytorch_tests.difference import Expected, Verdict\n" + expected)
        where = ["--state", str(tmp_path / "state"), "--json", str(tmp_path / "found.json")]
        code = tool.main([str(path), *where, "--expected", str(tmp_path / "expected.py"), *arguments])
        found = json.loads((tmp_path / "found.json").read_text())
        cases = {row["case"].rpartition("::")[2]: (row["verdict"], *row["outcomes"]) for row in found["cases"]}
        return code, cases, capsys.readouterr().out

    return run


def test_every_way_to_end_and_expectations(command, tmp_path):
    """One run of all, then the same results against expectations that hold, and against one that doesn't."""
    code, cases, text = command("test_ends.py", EVERY_END, "--timeout", "4")
    assert cases == {f"test_{name}": row for name, row in VERDICTS.items()}
    assert code == 1 and "3 test cases are worse than on stock" in text
    assert "what the other side broke" in text and "over 4 s; it said" in text and "the process ended with -9" in text
    assert "test_ends.py::TestEnds::test_d_is_fixed: failed -> passed" in text
    seen = (tmp_path / "test_ends.seen").read_text().splitlines()
    assert not alive(int((tmp_path / "test_ends.pid").read_text()))
    counts = {name: seen.count(f"other test_{name}") for name in VERDICTS}
    assert counts == {name: 1 if row[0] in ("same", "still failing") else 2 for name, row in VERDICTS.items()}

    holds = """EXPECTED = [
        Expected("test_ends.py::*::test_[cfg]*", "brackets aren't special here"),
        Expected("test_ends.py::TestEnds::test_c_is_broken", "meant so", ">=2.0"),
        Expected("test_ends.py::TestEnds::test_?_*s_there", "hang and death"),
        Expected("test_ends.py::*fixed", "better", verdict=Verdict.FIXED),
        Expected("test_ends.py::*", "for a torch of long ago", "<1.0"),
        Expected("test_others.py::*", "of a file that isn't run"),
    ]"""
    code, _, text = command("test_ends.py", EVERY_END, "--timeout", "4", expected=holds)
    assert code == 1 and "matches no test case of its file any more. Its reason was: brackets" in text
    holds = holds.replace("test_[cfg]*", "test_c*")
    code, again, text = command("test_ends.py", EVERY_END, "--timeout", "4", expected=holds)
    assert code == 0 and "nothing is worse than on stock; 4 are expected" in text and again == cases
    assert (tmp_path / "test_ends.seen").read_text().splitlines() == seen, "the results were kept"

    stale = holds.replace("]", 'Expected("test_ends.py::*::test_a_passes", "once it failed")]')
    code, _, text = command("test_ends.py", EVERY_END, "--timeout", "4", expected=stale)
    assert code == 1 and "test_a_passes isn't broken any more, but same. Its reason was: once it failed" in text


def alive(pid):
    """Whether a process runs still; one that nobody has waited for yet doesn't."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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

    def test_hash(self):
        self.assertEqual(hash(self.mesh["dp"]), hash(self.mesh["dp"]))

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


def test_a_regression_planted_in_the_overlay_breaks_exactly_its_cases(command, tmp_path, monkeypatch):
    """A body that answers wrongly for one name, in the tested process and in one that it spawns."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "planted"))
    code, cases, text = command("test_meshes.py", MESHES, "--no-reruns", "--jobs", "2")
    assert code == 1 and "2 test cases are worse than on stock" in text
    assert cases == {
        "test_dp": ("same", "passed", "passed"),
        "test_hash": ("same", "passed", "passed"),
        "test_tp": ("broken", "passed", "failed"),
        "test_tp_in_a_spawned_process": ("broken", "passed", "failed"),
    }


# --- the parts


def test_the_list_of_expectations_can_be_read():
    for entry in tool.load(str(tool.EXPECTED)):
        assert entry.reason and "::" in entry.pattern
        entry.in_force("overlay", tool.release())
