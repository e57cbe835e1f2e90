"""A checkpoint as the source of a transfer on real ranks: whose bits come, who reads what, and what stops a run."""

import contextlib
import json
import math
import os
import random
import shutil
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import from_host
from rank_weights import same
from width import NIGHTLY

KINDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


def raw(tensor):
    """The bytes of a tensor, in order."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def write(path, tensors, change=lambda header: None, cut=0, extra=b""):
    """A safetensors file with tensors in the order of the dict, which needn't lie aligned."""
    header, at, data = {"__metadata__": {"format": "pt"}}, 0, []
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]
        }  # fmt: skip
        at += tensor.nbytes
        data.append(raw(tensor))
    change(header)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + b"".join(data) + extra
    with open(path, "wb") as file:
        file.write(whole[: len(whole) - cut])


def write_folder(folder, tensors, files=1):
    """A checkpoint of several files with an index, or one file without."""
    if files == 1:
        write(f"{folder}/model.safetensors", tensors)
        return
    names, weight_map = [*tensors], {}
    for number in range(files):
        some = names[number::files]
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        write(f"{folder}/{file}", {name: tensors[name] for name in some})
        weight_map |= dict.fromkeys(some, file)
    with open(f"{folder}/model.safetensors.index.json", "w") as index:
        json.dump({"metadata": {}, "weight_map": weight_map}, index)


SHAPES = ((16, 6), (40, 9), (17, 3, 5), (1, 700), (2, 3, 4, 5), (0, 4), (3, 0), (), (), (9,), (1,), (33,), (2000,))


@from_host
def drawn(shape, kind, seed):
    """A tensor of any bits that its type has."""
    size, bits = math.prod(shape) * kind.itemsize, torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if kind == torch.bool else 256, (size,), dtype=torch.uint8, generator=bits)
    return data.view(kind).reshape(shape)


def weights(seed):
    """Tensors of all types: empty ones, scalars, a long row; most don't begin aligned in their file."""
    rng = random.Random(seed)
    shapes = [*SHAPES, *[(rng.randint(1, 40), rng.randint(1, 30)) for _ in range(6)]]
    kinds = [*KINDS]
    rng.shuffle(shapes)
    rng.shuffle(kinds)
    kind_of = [kinds[number % len(kinds)] for number in range(len(shapes))]
    return {f"layers.{n}": drawn(shape, kind, seed * 100 + n) for n, (shape, kind) in enumerate(zip(shapes, kind_of))}


def equal(one, other):
    """To the bit; where a cast made NaN, but for which NaN it is."""
    if one.dtype == torch.float32:
        return same(one, other)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and raw(one) == raw(other)


class CheckpointCases:
    """Cases for ``EightRanks``."""

    @contextlib.contextmanager
    def folder(self):
        """One that all ranks see; rank 0 makes it, and removes it when all are done."""
        said = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(said)
        try:
            yield said[0]
            dist.barrier()
        finally:
            if self.rank == 0:
                shutil.rmtree(said[0])

    @contextlib.contextmanager
    def counted_reads(self):
        """A list of the bytes of each preadv."""
        sizes, preadv = [], os.preadv

        def counted(*args):
            size = preadv(*args)
            sizes.append(size)
            return size

        with mock.patch("os.preadv", counted):
            yield sizes

    def total(self, number):
        every = [None] * WORLD
        dist.all_gather_object(every, number)
        return sum(every)

    def write(self, folder, tensors, files=1):
        if self.rank == 0:
            write_folder(folder, tensors, files)
        dist.barrier()

    def loaded(self, whole, mesh, placements, dtype=None):
        """A DTensor of junk that is to become `whole`, and what this rank holds of it then."""
        want = distribute_tensor(whole.to(dtype or whole.dtype), mesh, placements, src_data_rank=None)
        junk = torch.ones_like(want._local_tensor)
        return DTensor.from_local(junk, mesh, placements, run_check=False, shape=want.shape, stride=want.stride()), want

    def test_any_shards_get_the_bits_of_the_files_and_each_byte_is_read_once(self):
        dense = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        half = make_root(range(4), (2, 2), ("dp", "tp"))
        copies = make_root(range(WORLD), (2, 4), ("r", "dp"))
        cuts = (
            (dense, (Shard(0), Shard(0))),
            (dense, (_StridedShard(0, split_factor=2), Shard(0))),
            (dense, (Shard(0), Shard(1))),
            (dense, (Replicate(), Shard(1))),
            (copies, (Replicate(), Shard(0))),
            (copies, (Replicate(), Replicate())),
            (half, (Shard(0), Shard(1))),
        )
        for seed in range(12 if NIGHTLY else 4):
            rng = random.Random(seed)
            tensors, files = weights(seed), rng.choice((1, 3))
            readers = rng.sample(range(WORLD), rng.choice((1, 3, WORLD)))
            target, wanted = {}, {}
            for name, whole in tensors.items():
                mesh, placements = rng.choice(cuts)
                dtype = torch.float32 if whole.dtype in (torch.bfloat16, torch.float64) and rng.random() < 0.7 else None
                fits = all(p.is_replicate() or p.dim < whole.ndim for p in placements)
                if type(placements[0]) is _StridedShard and whole.ndim:
                    fits = whole.shape[0] % WORLD == 0
                if not fits or rng.random() < 0.15:
                    target[name] = torch.full_like(whole, 1, dtype=dtype)  # plain: each rank has all of it
                    wanted[name] = whole.to(dtype or whole.dtype)
                else:
                    target[name], want = self.loaded(whole, mesh, placements, dtype)
                    wanted[name] = want._local_tensor
                    if mesh.get_coordinate() is None:
                        del target[name]
            budget = rng.choice((1 << 12, 1 << 14, 1 << 20))
            with self.folder() as folder:
                self.write(folder, tensors, files)
                source = torch_overlay.checkpoint(folder) if self.rank in readers else None
                with torch_overlay.Transfer(source, target, budget=budget) as transfer:
                    for _ in range(2):
                        with self.counted_reads() as sizes:
                            transfer.run()
                        for name, tensor in target.items():
                            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                            self.assertTrue(equal(local, wanted[name]), f"{seed} {name} {wanted[name].dtype}")
                        size = sum(tensor.nbytes for tensor in tensors.values())
                        self.assertEqual(self.total(sum(sizes)), size, f"{seed} {readers}")
                        share = -(-size // len(readers)) + 2 * 30 * 8  # rows
                        self.assertTrue(sum(sizes) <= share if source else not sizes, (sum(sizes), share))
