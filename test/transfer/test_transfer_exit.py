"""A program that ends without waiting for its run in the background: the interpreter waits, and nothing is torn."""

import subprocess
import sys

import pytest

from way import needs_package
from width import NIGHTLY

RANKS = 2
PROGRAM = """
import sys, torch, torch.distributed as dist
import torch_overlay

rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
if rank == 0:
    weights = torch.full((1 << 24,), 3.0)
else:
    weights = torch.from_file(folder + "/weights", shared=True, size=1 << 24)
sync = torch_overlay.Transfer(*(({"w": weights}, None) if rank == 0 else (None, {"w": weights})), budget=1 << 20)
sync.run(async_op=True)
if how == "destroyed":
    dist.destroy_process_group()
if how == "raised":
    raise ZeroDivisionError("the step failed")
"""


@needs_package
@pytest.mark.parametrize("how", ["left", "raised", "destroyed"] if NIGHTLY else ["raised"])  # raised leaves, too
def test_a_run_that_nobody_waited_for_ends_before_the_program(how, tmp_path):
    """Was SIGABRT, and half of the weights."""
    import torch

    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), how], stderr=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    said = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [int(how == "raised")] * RANKS, said
    assert ["ZeroDivisionError: the step failed" in each for each in said] == [how == "raised"] * RANKS
    came = torch.from_file(str(tmp_path / "weights"), shared=True, size=1 << 24)
    assert bool((came == 3).all()), "torn"
