"""`tools/bench.py gpu`: no GPU is a sentence and status 2, and on gloo all of its code runs and its file is whole."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from width import NIGHTLY

ROOT = pathlib.Path(__file__).parents[2]


def bench(folder, *arguments):
    """The command in a folder, on a machine whose GPUs it doesn't see."""
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "gpu", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_without_gpus_it_says_so_in_one_line(tmp_path):
    done = bench(tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("bench gpu: needs 2 GPUs on this host, and torch ") and line.endswith(" finds 0")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not NIGHTLY, reason="half a minute of tools: only at night")
def test_the_same_code_on_gloo(bench_here, tmp_path):
    """Four ranks, the smallest of everything: each part has its rows, and nothing is wrong. The fuzz has tests of its
    own, and runs at night."""
    cases = 6 if NIGHTLY else 0
    tiny = (
        "--ranks",
        "4",
        "--sizes",
        "1024",
        "--pairs",
        "3",
        "--tree-bytes",
        "1024",
        "--repeats",
        "1",
        "--fuzz",
        str(cases),
    )
    bench_here("gpu", "--backend", "gloo", "--device", "cpu", *tiny, "--fuzz", str(cases))
    found = json.loads((tmp_path / "torch_overlay_gpu.json").read_text())
    assert {row["where"]["part"] for row in found["rows"]} == {"groups", "moves", "overlap", "trees", *["fuzz"][:cases]}
    (groups,) = [row for row in found["rows"] if row["name"] == "groups"]
    # Of two ranks: stock has pp three times, and cp, fsdp, ep; ours has pp once and a group for the whole.
    assert (groups["stock"], groups["overlay"]) == (6, 5)
    names = {row["name"].partition(",")[0] for row in found["rows"] if row["where"]["part"] == "trees"}
    assert len(names) == 4
    shares = {row["where"]["share_groups"] for row in found["rows"] if row["where"]["part"] == "overlap"}
    assert shares == {"names", "ranks"}
    assert [target["met"] for target in found["targets"]] == [True] * (3 if cases else 1)
    assert found["facts"]["ran on"] | {"backend": "gloo", "device": "cpu", "ranks": 4} == found["facts"]["ran on"]
    assert not cases or found["facts"]["fuzz"]["cases"] == cases
    assert any("says nothing about GPUs" in note for note in found["notes"])
