"""The programs that pages begin with run as they stand, by the command below them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from width import NIGHTLY

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GATE = ("transfer.md",)  # the others at night
NAMED = re.compile(r"# (\w+\.py)\b")  # the first line of a program


def programs() -> dict[str, tuple[str, str, str]]:
    """By page: the name of its program, the program, and the first command that names it."""
    found = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
        for language, text in blocks:
            if language == "python" and (named := NAMED.match(text)):
                command = next(line for kind, line in blocks if kind == "bash" and named[1] in line)
                found[page.name] = named[1], text, command
    return found


def test_each_page_of_a_task_begins_with_a_program():
    tasks = ["transfer", "places", "changes", "checkpoint", "parallel_dims", "hang", "slow", "start"]
    assert {*programs()} == {f"{name}.md" for name in tasks}


@pytest.mark.parametrize("page", programs())
def test_a_program_runs(page, tmp_path):
    if page not in GATE and not NIGHTLY:
        pytest.skip("ten seconds of ranks that start: only at night")
    name, text, command = programs()[page]
    (tmp_path / name).write_text(text)
    first = str(ROOT), str(pathlib.Path(sys.executable).parent)
    paths = {
        name: os.pathsep.join([path, os.environ.get(name, "")]) for name, path in zip(("PYTHONPATH", "PATH"), first)
    }
    environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {
        "transfer.md": "rank 3 has the weights of step 2",
        "places.md": "server: step 2, w is 3",
        "changes.md": "run 2: 1,536 bytes, 256 of 655,360 elements",
        "checkpoint.md": "rank 3 has its shards of 6 tensors",
        "parallel_dims.md": "norm 48.17",
        "hang.md": "rank 1: All 2 ranks must build the same mesh, and they differ",
        "start.md": "",
        "slow.md": 'mesh["fsdp", "tp"].flatten("fsdp_tp") would have saved 1',
    }
    assert said[page] in done.stdout
