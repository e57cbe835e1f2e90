"""The switch for the device of the suites: it reaches tensors, meshes and worlds of the ranks, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# A rank of another process: torch's device without memory stands for a GPU.
RANK = """
import json, multiprocessing, sys

def rank(pipe):
    import torch, on_device, mesh_harness
    from mesh_ranks import EightRanks
    on_device.take(3)
    numbers = on_device.from_host(lambda: torch.rand(2, generator=torch.Generator().manual_seed(0)))()
    with mesh_harness.fake_world(0, 2):
        mesh = mesh_harness.make_root(range(2), (2,), ("a",))
        part = mesh_harness.make_root((0,), (1,), ("a",))
    pipe.send([str(torch.zeros(1).device), str(numbers.device), mesh.device_type, part.device_type,
               EightRanks.backend_str(), EightRanks.device_type(), on_device.RANKS_PER_GPU])

if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    import on_device
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=rank, args=(theirs,))
    del sys.modules["on_device"]
    process.start()
    print(json.dumps([on_device.DEVICE, ours.recv()]))
"""


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, ["cpu", "cpu", "cpu", "cpu", "gloo", "cpu", 8]),
        ({"DEVICE": "meta", "SHARE": "2"}, ["meta", "meta", "meta", "meta", "nccl", "meta", 2]),
    ],
    ids=["default", "device"],
)
def test_it_reaches_what_ranks_make(more, wanted):
    environment = os.environ | {f"OVERLAY_TESTS_{name}": value for name, value in more.items()}
    folders = [str(TESTS.parent), str(TESTS), str(TESTS / "mesh")]
    done = subprocess.run(
        [sys.executable, "-c", RANK, *folders], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    here, there = json.loads(done.stdout.splitlines()[-1])
    assert (here, there) == ("cpu", wanted)


def test_options_reach_the_ranks(monkeypatch):
    import on_device

    for name in on_device.NAMES.values():
        monkeypatch.delenv(name, raising=False)
    given = {"device": "cuda", "ranks_per_gpu": "4"}

    class Config:
        @staticmethod
        def getoption(name, default):
            return given.get(name, default)

    on_device.pass_on(Config)
    assert [os.environ.get(name) for name in on_device.NAMES.values()] == ["cuda", None, "4"]
    for name in on_device.NAMES.values():
        monkeypatch.delenv(name, raising=False)
