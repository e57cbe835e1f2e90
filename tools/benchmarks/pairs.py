"""Redistributions to measure: which pair of placements on which mesh, and what each rank must hold before and after.

Written as `explain` writes them: ``P,S0,R -> R,R,S0`` on mesh 2,2,2; P is a pending sum, A a pending average.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

TYPES = ("float32", "bfloat16", "float32", "int64")  # of `parameters`
_FIXED = {
    (2, 2, 2): """
        S0,S0,S0 -> R,R,R    S0,S0,R -> R,R,R     S0,S1,R -> R,R,R     S0,R,S1 -> R,R,R
        S0,R,R -> S1,R,R     S0,S0,R -> S1,S1,R   S0,S1,R -> S1,S0,R   S0,S1,S0 -> S1,S0,S1
        S0,S0,S1 -> R,S1,S0  S0,R,S1 -> R,S0,S1   S0,S0,S0 -> S1,R,S0  R,S0,S1 -> S0,S1,R
        P,P,P -> R,R,R       P,P,R -> R,R,R       P,P,P -> S0,S0,S0    P,P,R -> S0,S0,R
        P,S0,R -> R,R,S0     P,R,R -> S0,R,R      P,S0,S0 -> R,R,R     P,P,S0 -> S0,R,R
        A,P,R -> R,R,R       P,S0,S1 -> S0,S1,R
    """,
    (4, 2): """
        S0,S0 -> R,R         S0,S1 -> R,R         S0,S1 -> S1,S0       S0,R -> S1,R
        P,P -> R,R           P,P -> S0,S0
    """,
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A source and a target, one placement an axis, on a mesh of these sizes."""

    sizes: tuple[int, ...]
    source: tuple[str, ...]
    target: tuple[str, ...]

    def __str__(self) -> str:
        return f"{','.join(map(str, self.sizes))}: {','.join(self.source)} -> {','.join(self.target)}"

    @property
    def is_move(self) -> bool:
        """Whether nothing is reduced."""
        return not {"P", "A"} & {*self.source}


def fixed(ranks: int) -> list[Pair]:
    pairs = []
    for sizes, text in _FIXED.items():
        for one in text.replace(" -> ", "->").split():
            source, target = one.split("->")
            pairs.append(Pair(sizes, tuple(source.split(",")), tuple(target.split(","))))
    return [pair for pair in pairs if math.prod(pair.sizes) == ranks]


def fewer(ranks: int) -> list[Pair]:
    """The pairs of two axes on a mesh of 4 or 2 ranks, for a host that has no 8."""
    return [dataclasses.replace(pair, sizes=(ranks // 2, 2)) for pair in fixed(8) if len(pair.sizes) == 2]


def random_moves(count: int, seed: int, ranks: int) -> list[Pair]:
    rng = random.Random(seed)
    meshes = [sizes for sizes in _FIXED if math.prod(sizes) == ranks]
    moves: list[Pair] = []
    while len(moves) < count:
        sizes = rng.choice(meshes)
        source, target = (tuple(rng.choice(("R", "S0", "S1")) for _ in sizes) for _ in range(2))
        if source != target:
            moves.append(Pair(sizes, source, target))
    return moves


def placements(codes: tuple[str, ...]) -> tuple[Placement, ...]:
    known = {"R": Replicate(), "P": Partial(), "A": Partial("avg")}
    return tuple(Shard(int(code[1:])) if code.startswith("S") else known[code] for code in codes)


def flattened_mesh(sizes: tuple[int, ...], device: str = "cpu") -> DeviceMesh:
    """A mesh of the world with every set of two or more axes flattened, so that both sides may merge what they can."""
    names = tuple("abcdef"[: len(sizes)])
    mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
    for count in range(2, len(names) + 1):
        for some in itertools.combinations(names, count):
            mesh[some]._flatten("_".join(some))
    return mesh


# --- data: the whole tensor, and what of it a rank holds


def shape_of(size: int) -> tuple[int, int]:
    """Two dims of float32 that make this many bytes. Raises ValueError if a mesh of 8 can't cut both evenly."""
    elements = size // 4
    rows = 1 << max(elements.bit_length() - 1, 0) // 2
    columns = elements // max(rows, 1)
    if rows * columns * 4 != size or rows % 8 or columns % 8:
        raise ValueError(f"a size must be a product of two multiples of 8 float32, as 1024 or 65536 bytes; got {size}")
    return rows, columns


def local_target(pair: Pair, at: tuple[int, ...], shape: tuple[int, int]) -> torch.Tensor:
    factor, offset = 1, {c: float(_share(pair, c)) for c in itertools.product(*map(range, pair.sizes))}
    for axis, code in enumerate(pair.source):
        if code not in ("P", "A"):
            continue
        size = pair.sizes[axis]
        line = {c: [offset[(*c[:axis], i, *c[axis + 1 :])] for i in range(size)] for c in offset}
        offset = {c: sum(terms) / (size if code == "A" else 1) for c, terms in line.items()}
        factor *= 1 if code == "A" else size
    return _cut(_whole(shape), pair.target, pair.sizes, at) * factor + offset[at]


def source_tensor(pair: Pair, mesh: DeviceMesh, shape: tuple[int, int]) -> DTensor:
    at = tuple(mesh.get_coordinate() or ())
    local = (_cut(_whole(shape), pair.source, pair.sizes, at) + _share(pair, at)).to(mesh.device_type)
    strides = (shape[1], 1)
    return DTensor.from_local(local, mesh, placements(pair.source), run_check=False, shape=shape, stride=strides)


def _whole(shape: tuple[int, int]) -> torch.Tensor:
    return (torch.arange(math.prod(shape), dtype=torch.int64) % 1009).to(torch.float32).view(shape)


def _share(pair: Pair, at: tuple[int, ...]) -> int:
    """What a rank adds to the whole on the axes that are pending: its coordinate there, so that no two are equal."""
    share = 0
    for code, size, index in zip(pair.source, pair.sizes, at):
        if code in ("P", "A"):
            share = share * size + index
    return share


def _cut(whole: torch.Tensor, codes: tuple[str, ...], sizes: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    for code, size, index in zip(codes, sizes, at):
        if code.startswith("S"):
            dim = int(code[1:])
            length = whole.shape[dim] // size
            whole = whole.narrow(dim, index * length, length)
    return whole.clone()


def parameters(mesh: DeviceMesh, size: int, count: int) -> dict[str, DTensor]:
    """Parameters of one size in bytes, of different shapes, types and placements; the same on every rank."""
    ends = [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(1), Shard(0))]
    tensors = {}
    for number in range(count):
        dtype = getattr(torch, TYPES[number % len(TYPES)])
        elements = size // dtype.itemsize
        rows = 1 << (elements.bit_length() // 2 + number % 3 - 1)
        whole = (torch.arange(elements) % 251 + number).to(dtype).view(rows, -1)
        tensors[f"p{number}"] = distribute_tensor(whole, mesh, ends[number // 4 % 4], src_data_rank=None)
    return tensors
