"""Unmodified transformers and torchtitan on 8 gloo ranks: what they move is equal to the bit on both sides."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from width import NIGHTLY

ROOT = pathlib.Path(__file__).parents[2]
RANKS = 8
CLIENTS = {"transformers_experts": "transformers", "torchtitan_meshes": "torchtitan"}
# Loopback and no way to a hub: what a client needs is made from its configuration.
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
pytestmark = pytest.mark.skipif(not NIGHTLY, reason="runs other people's programs: TORCH_OVERLAY_NIGHTLY=1")


def ran(client, folder, *how, ranks=RANKS):
    """What each rank found, in torchrun behind these words."""
    folder.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *how, *torchrun, str(pathlib.Path(__file__).with_name("client.py")), client, folder]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **QUIET, "PYTHONPATH": path}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_experts_go_as_they_lie(ranks, tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers isn't installed: nox -s clients")
    found = ran("transformers_packed", tmp_path / "packed", "-m", "torch_overlay", "run", ranks=ranks)
    # By the plans with tensor parallelism, a rank has two boxes of the fused projections, else one.
    assert [one["boxes"] for one in found] == [6 if ranks == 4 else 5] * ranks


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_what_stock_gives_it_by_fewer_collectives(client, tmp_path):
    if importlib.util.find_spec(CLIENTS[client]) is None:
        pytest.skip(f"{CLIENTS[client]} isn't installed: nox -s clients")
    stock = ran(client, tmp_path / "stock")
    overlay = ran(client, tmp_path / "overlay", "-m", "torch_overlay", "run")
    assert [one["overlay"] for one in (*stock, *overlay)] == [False] * RANKS + [True] * RANKS
    for ours, theirs in zip(overlay, stock):
        for kind in ("moved", "summed"):
            assert ours[kind].keys() == theirs[kind].keys() and theirs[kind]
        for name, value in theirs["moved"].items():
            assert torch.equal(ours["moved"][name], value), name
        for name, value in theirs["summed"].items():
            torch.testing.assert_close(ours["summed"][name], value, rtol=1e-5, atol=1e-7, msg=name)
        assert ours["calls"] < theirs["calls"]
        assert sum(ours["collectives"].values()) < sum(theirs["collectives"].values())
        assert all(count <= theirs["collectives"][name] for name, count in ours["collectives"].items())
