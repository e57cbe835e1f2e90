"""The fuzz command on real ranks finds nothing."""

import pathlib
import subprocess
import sys

import pytest

from mesh_harness import needs_overlay
from width import NIGHTLY

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


@needs_overlay
@pytest.mark.skipif(not NIGHTLY, reason="processes of its own for what test_redistribute_ranks.py draws: only at night")
def test_the_command_finds_nothing_on_real_ranks():
    ran = subprocess.run(
        [sys.executable, TOOLS / "fuzz_redistribute.py", "--ranks", "4", "--cases", "60", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0 and "60 right, 0 wrong, 0 raised, 0 hung" in ran.stdout, ran.stdout + ran.stderr
