"""Checkpoints as sources: on eight ranks, and what is said of files that aren't what they have to be."""

import json
import math
import os
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.common_utils import run_tests

import torch_overlay
from mesh_ranks import EightRanks
from rank_checkpoint import KINDS, CheckpointCases, drawn, equal, weights, write, write_folder
from torch_overlay.distributed.tensor._planner.boxes import Box
from torch_overlay.transfers import checkpoint
from torch_overlay.transfers._planner.sides import Ranks
from torch_overlay.transfers.checkpoint import Contents
from torch_overlay.transfers.sharding import Sharding, regions_on
from torch_overlay.transfers.tensor_files import INDEX
from way import needs_package

pytestmark = needs_package
ONE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)}


def row(**changes):
    """Changes the row of "b" in a header."""
    return lambda header: header["b"].update(changes)


def twice(header):
    header["b"]["data_offsets"] = [0, 32]


# What is done to a file with the tensors of ONE, and what is said of it.
BAD = {
    "cut": (dict(cut=1), "its tensors end with 'b' at byte .*, and the file at byte"),
    "longer": (dict(extra=b"x"), "its tensors end with 'b' at byte .*, and the file at byte"),
    "cut in the header": (dict(cut=100), "its header would have"),
    "empty": (dict(cut=10_000), "it has 0 bytes"),
    "no JSON": (dict(change=lambda header: header.clear()), "its tensors end at byte"),
    "overlap": (dict(change=twice), "'a' overlaps the tensor before it"),
    "gap": (dict(change=row(data_offsets=[32, 64]), extra=b"12345678"), "'b' leaves a gap before it"),
    "size": (dict(change=row(shape=[5])), r"'b' has shape \[5\] and type I64, and lies in 32 bytes"),
    "negative": (dict(change=row(shape=[-2, -2])), "aren't whole numbers"),
    "truth": (dict(change=row(shape=[True, 4])), "aren't whole numbers"),
    "type": (dict(change=row(dtype="F4")), "'b' has type 'F4', which torch doesn't have"),
    "odd type": (dict(change=row(dtype=["I64"])), "'b' has type .*, which torch doesn't have"),
    "no offsets": (dict(change=lambda header: header["b"].pop("data_offsets")), "'b' isn't described by"),
    "no row": (dict(change=lambda header: header.update(b=3)), "'b' isn't described by"),
}


@pytest.mark.parametrize("kind", BAD)
def test_headers_that_do_not_fit_their_file(tmp_path, kind):
    how, said = BAD[kind]
    write(tmp_path / "model.safetensors", ONE, **how)
    source = torch_overlay.checkpoint(tmp_path)
    with pytest.raises(ValueError, match=f"(?s)model.safetensors is no safetensors file that can be read: .*{said}"):
        source.read()
    try:
        from safetensors.torch import load_file
    except ImportError:
        return  # a skip would hide what was tested
    with pytest.raises(Exception):  # noqa: B017
        load_file(tmp_path / "model.safetensors")


def test_names_that_come_twice_and_files_that_are_not_there(tmp_path):
    def said(match):
        with pytest.raises(ValueError, match=match):
            torch_overlay.checkpoint(tmp_path).read()

    def index(text):
        (tmp_path / INDEX).write_text(text if isinstance(text, str) else json.dumps({"weight_map": text}))

    said("has no file that ends in .safetensors")
    write(tmp_path / "one.safetensors", {"a": ONE["a"]})
    write(tmp_path / "two.safetensors", ONE)
    said("'a' is in two files, one.safetensors and two.safetensors")
    index({"a": "one.safetensors", "b": "two.safetensors"})
    said("'a' is in two files, one.safetensors and two.safetensors")
    index({"a": "two.safetensors", "b": "two.safetensors"})
    assert [entry.name for entry in torch_overlay.checkpoint(tmp_path).read().entries] == ["a", "b"]
    index({"a": "two.safetensors", "c": "two.safetensors"})
    said("'c' is in two.safetensors, and it isn't there")
    index({"a": "three.safetensors"})
    said("'a' is in three.safetensors, and there is no such file")
    for outside in ("../one.safetensors", f"{tmp_path}/one.safetensors", "x/../../one.safetensors", 3):
        index({"a": outside})
        said("'a' is in .*, which isn't inside the folder")
    index('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    said("it has 'a' twice, with 'one.safetensors' and 'two.safetensors'")
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'):
        index(text)
        said("is no index of safetensors files")


def test_a_file_with_a_name_twice_in_its_header(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"a": ONE["b"], "b": ONE["b"]})
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"a"'))
    with pytest.raises(ValueError, match="it has 'a' twice"):
        torch_overlay.checkpoint(tmp_path).read()


def test_links_are_followed(tmp_path):
    """As in a cache of Hugging Face's, where a snapshot's files are links to blobs beside it."""
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blob", ONE)
    os.symlink("../blob", tmp_path / "snapshot" / "model.safetensors")
    files = torch_overlay.checkpoint(tmp_path / "snapshot").read()
    assert [entry.name for entry in files.entries] == ["a", "b"] and not files.changes()


SHAPES = {
    "rows": (40, 6),
    "line": (90,),
    "cube": (5, 4, 3),
    "one": (),
    "none": (0, 3),
    "uneven": (7, 9),
    "long": (3, 300),
}


@pytest.mark.parametrize("own", (1, 40, 1 << 20))
@pytest.mark.parametrize("readers", (1, 2, 3, 8))
@pytest.mark.parametrize("seed", range(6))
def test_readers_read_what_they_want_themselves(monkeypatch, own, readers, seed):
    """All bytes once, no reader much more than another; and where FSDP cuts rows, nobody sends any."""
    monkeypatch.setattr(checkpoint, "OWN", own)
    rng = random.Random(seed)
    rows = [[name, "float32", shape, 0, 0, [name]] for name, shape in SHAPES.items()]
    contents = Contents({"tensors": rows}, range(readers))
    sizes = rng.choice([(8,), (4, 2), (2, 2, 2)])
    targets, wanted = {}, {}
    for name, shape in SHAPES.items():
        placements = [rng.choice([Replicate(), *[Shard(dim) for dim in range(len(shape))]]) for _ in sizes]
        if seed == 0:
            sizes, placements = (readers,), [Shard(0) if shape else Replicate()]
        regions = regions_on(tuple(placements), None, shape, sizes)
        ranks = tuple(range(math.prod(sizes)))
        targets[name] = Sharding("float32", regions, ranks, "cpu")
        mesh = Ranks.of(ranks, sizes)
        wanted[name] = {rank: regions.box(mesh.coordinate(rank)) for rank in ranks}
    if seed == 1:  # pieces that overlap, and leave rows out
        boxes = tuple([(Box((3 * rank, 0), (9, 6)),) for rank in range(8)])
        targets["rows"] = Sharding("float32", targets["rows"].regions, tuple(range(8)), "cpu", boxes)
    shares = contents.shares(targets, 1 << 20)
    read = {name: [] for name in SHAPES}
    loads = [0] * readers
    for reader, share in enumerate(shares):
        for part in [part for some in share for part in some]:
            name, loads[reader] = contents.entries[part.entry].name, loads[reader] + contents.size(part)
            read[name] += range(part.first, part.last)
            if seed == 0 and own == 1 and readers < 8 and part.first < part.last and SHAPES[name]:
                (start, length), row = wanted[name][reader], math.prod(SHAPES[name][1:])
                assert start[0] * row <= part.first <= part.last <= (start[0] + length[0]) * row, (name, part)
    assert all(sorted(read[name]) == [*range(math.prod(shape))] for name, shape in SHAPES.items())
    longest = 4 * max(math.prod(shape[1:]) for shape in SHAPES.values())
    assert max(loads) <= checkpoint.UNEVEN * sum(loads) / readers + longest


@pytest.mark.parametrize("readers", (1, 2, 7, 64))
@pytest.mark.parametrize("room", (16, 48, 1024, 1 << 20))
def test_shares_are_all_bytes_once_in_order(tmp_path, readers, room):
    """Each element of each tensor belongs to one part, rounds fit, shares are equal, and boxes make the part."""
    write_folder(tmp_path, weights(readers), 2)
    data = torch_overlay.checkpoint(tmp_path).read().as_data(lambda name: [name])
    contents = Contents(data, range(readers))
    shares = contents.shares(dict.fromkeys(contents.numbers), room)
    parts = [part for share in shares for some in share for part in some]
    assert [part for part in parts if part.last] == sorted(part for part in parts if part.last)
    at = {}
    for entry, first, last in parts:
        assert at.get(entry, 0) == first
        at[entry] = last
    assert at == {number: entry.elements for number, entry in enumerate(contents.entries)}
    sizes = [sum((p.last - p.first) * contents.entries[p.entry].itemsize for r in share for p in r) for share in shares]
    assert max(sizes) <= sum(sizes) / readers + room // 4 + 16
    for share in shares:
        for some in share:
            size = [(part.last - part.first) * contents.entries[part.entry].itemsize for part in some]
            assert sum(n + -n % 16 for n in size) <= room
            for part in some:
                whole = torch.arange(contents.entries[part.entry].elements).reshape(contents.entries[part.entry].shape)
                boxes = [
                    whole[tuple(slice(start, start + many) for start, many in zip(*box))].reshape(-1)
                    for box in contents.boxes(part)
                ]
                assert torch.equal(torch.cat(boxes), torch.arange(part.first, part.last))


def test_files_of_the_package_itself(tmp_path):
    """Those that `safetensors` writes, if it is installed, have the same tensors."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {str(kind): drawn((3, 5), kind, 0) for kind in KINDS} | {
        "scalar": torch.tensor(3),
        "empty": torch.ones(0, 2),
    }
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = torch_overlay.checkpoint(tmp_path).read()
    raw = (tmp_path / "model.safetensors").read_bytes()
    for entry in files.entries:
        data = bytearray(raw[entry.begin : entry.begin + entry.elements * entry.itemsize])
        found = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        assert equal(found.view(getattr(torch, entry.dtype)).reshape(entry.shape), tensors[entry.name]), entry.name
    assert len(files.entries) == len(tensors)


class TestCheckpointOnEightRanks(CheckpointCases, EightRanks):
    """Each method runs on all eight ranks, in a world of its own."""


if __name__ == "__main__":
    run_tests()
