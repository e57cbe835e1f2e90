"""The fuzz command on real ranks: finds nothing, and finds what is made wrong."""

import pathlib
import subprocess
import sys

import pytest

from mesh_harness import STOCK, needs_overlay
from twins_ranks import Case, MeshRecipe

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


@needs_overlay
def test_the_command_finds_nothing_on_real_ranks():
    ran = subprocess.run(
        [sys.executable, TOOLS / "fuzz_redistribute.py", "--ranks", "4", "--cases", "60", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0 and "60 right, 0 wrong, 0 raised, 0 hung" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.skipif(STOCK, reason="about the cases, not about torch")
def test_a_case_sees_what_is_wrong():
    """One element of another rank, a term too many, another shape, another type."""
    recipe = MeshRecipe(tuple(range(4)), (2, 2))
    case = Case(recipe, (("P", "sum"), ("S", 0)), (("S", 1), ("R",)), (4, 6))
    for here in recipe.twin().coordinates():
        right = case.expected(here).float()
        assert case.difference(right, here) is None
        other = case.expected((1 - here[0], here[1])).float()
        for wrong in (other, right + case.given(here)[:, :1].sum(), right[:2], right.double()):
            assert case.difference(wrong, here), wrong
    moved = Case(recipe, (("S", 0), ("S", 1)), (("R",), ("R",)), (4, 6), "bfloat16")
    right = moved.expected((0, 0)).bfloat16()
    assert moved.difference(right, (0, 0)) is None and moved.difference(right.flip(0), (0, 0))
