"""The page's adapter beside torchtitan's own class: the same meshes for the same questions, where torchtitan is."""

import doctest
import itertools
import re
from pathlib import Path

import pytest

from dims_twin import all_degrees, overlay
from mesh_harness import fake_world
from torch_overlay.parallel_dims import ParallelDims

PAGE = Path(__file__).parents[2] / "docs" / "developers" / "clients.md"
AXES = ("pp", "batch", "loss", "dp_replicate", "fsdp", "cp", "tp", "ep", "efsdp")
SEVERAL = (["dp_replicate", "fsdp"], ["dp_replicate", "efsdp"], ["batch", "cp"], ["efsdp", "ep"], ["fsdp", "tp"])


def adapter():
    """The class as the page prints it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [text for text in blocks if "TitanDims:" in text]
    namespace = {"ParallelDims": ParallelDims}
    exec(doctest.DocTestParser().get_examples(block)[0].source, namespace)
    return namespace["TitanDims"]


@pytest.fixture(scope="module")
def titan():
    reason = "torchtitan (0.3.0, and a torch that it runs on) isn't installed"
    room = pytest.importorskip("torchtitan.distributed.parallel_dims", reason=reason, exc_type=ImportError)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "device_type", "cpu")
        yield room.ParallelDims


def answer(dims, asked):
    """The ranks and whether there is a mesh at all; the message of an error doesn't count."""
    mesh = dims.get_optional_mesh(asked)
    try:
        same = dims.get_mesh(asked) is mesh
    except ValueError:
        same = mesh is None
    assert same
    return None if mesh is None else mesh.mesh.tolist()


@pytest.mark.parametrize("size, every", [(8, 3), (64, 150)])
def test_adapter_answers_as_torchtitans_class(titan, size, every):
    ours = adapter()
    checked = 0
    for degrees in itertools.islice(all_degrees(size), 0, None, every):
        if degrees.pop("etp") > 1:
            continue  # torchtitan has none
        for rank in (0, size - 1):
            with overlay(True), fake_world(rank, size):
                theirs = titan(**degrees, world_size=size, spmd_backend="partial_dtensor")
                mine = ours(**degrees, world_size=size)
                for asked in (*AXES, *SEVERAL):
                    assert answer(mine, asked) == answer(theirs, asked), (degrees, rank, asked)
                    checked += 1
    assert checked > 200


def test_adapter_without_torchtitan():
    """What the page says of it, in numbers: None for a degree of 1, but for what FSDP is given."""
    with overlay(True), fake_world(5, 8):
        dims = adapter()(dp_replicate=1, dp_shard=-1, cp=2, tp=2, pp=1, ep=4, world_size=8)
        assert answer(dims, "pp") is None and answer(dims, ["dp_replicate", "fsdp"]) is None
        assert answer(dims, "tp") == [4, 5] and answer(dims, ["fsdp", "tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with pytest.raises(ValueError, match="mesh 'pp' isn't available"):
            dims.get_mesh("pp")
    with overlay(True), fake_world(0, 1):
        dims = adapter()(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
        assert answer(dims, "fsdp") == [0] and answer(dims, "efsdp") is None and answer(dims, "batch") is None
