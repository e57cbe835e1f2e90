"""The switch for the device of the suites: it reaches tensors, meshes and worlds of the ranks, and nothing else."""

import os

import pytest

import forks


def rank(pipe, more):
    """A rank of another process: torch's device without memory stands for a GPU."""
    os.environ.update(more)
    import torch

    import mesh_harness
    import on_device
    from mesh_ranks import EightRanks

    on_device.take(3)
    numbers = on_device.from_host(lambda: torch.rand(2, generator=torch.Generator().manual_seed(0)))()
    with mesh_harness.fake_world(0, 2):
        mesh = mesh_harness.make_root(range(2), (2,), ("a",))
        part = mesh_harness.make_root((0,), (1,), ("a",))
    kinds = [torch.zeros(1).device.type, numbers.device.type, mesh.device_type, part.device_type]
    pipe.send([*kinds, EightRanks.backend_str(), EightRanks.device_type(), on_device.RANKS_PER_GPU])


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, ["cpu", "cpu", "cpu", "cpu", "gloo", "cpu", 8]),
        ({"DEVICE": "meta", "SHARE": "2"}, ["meta", "meta", "meta", "meta", "nccl", "meta", 2]),
        ({"DEVICE": "meta", "BACKEND": "gloo"}, ["meta", "meta", "meta", "meta", "gloo", "meta", 8]),
    ],
    ids=["default", "device", "backend"],
)
def test_it_reaches_what_ranks_make(more, wanted):
    context = forks.context()
    ours, theirs = context.Pipe()
    environment = {f"OVERLAY_TESTS_{name}": value for name, value in more.items()}
    process = context.Process(target=rank, args=(theirs, environment), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == wanted
    finally:
        process.join(20)


def test_options_reach_the_ranks_and_not_this_process(monkeypatch):
    import on_device

    for name in on_device.NAMES.values():
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    given = {"device": "cuda", "ranks_per_gpu": "4"}

    class Config:
        @staticmethod
        def getoption(name, default):
            return given.get(name, default)

    on_device.pass_on(Config)
    assert [os.environ.get(name) for name in on_device.NAMES.values()] == ["cuda", None, "4"]
    assert on_device.DEVICE == "cpu" and not on_device.IS_RANK
