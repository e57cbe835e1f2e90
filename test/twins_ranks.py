"""One redistribution on real ranks, and what each rank must hold after it: the whole tensor, reduced and cut by hand.

A `Case` and the `MeshRecipe` in it are values that every rank reads alike; their repr is code that makes them again.
Nothing here uses the regions, plans or runners of the code under test. Placements are pairs, as in `twins_tensor`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from twins import MeshTwin
from twins_tensor import rows

TORCH = {"R": Replicate, "S": Shard, "P": Partial, "SS": lambda dim, factor: _StridedShard(dim, split_factor=factor)}
NAMES = "abcdef"

# Below which whole numbers stay exact in a type, when 8 of them are added up.
EXACT = {
    "bool": 2,
    "float8_e4m3fn": 2,
    "float8_e5m2": 1,
    "int8": 15,
    "uint8": 30,
    "bfloat16": 30,
    "float16": 250,
    "int16": 4000,
}
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


@dataclass(frozen=True)
class MeshRecipe:
    """A root mesh of these ranks and sizes, and the view of it that a case is about.

    Attributes:
        view: the view's axes, each a string of one or more of the root's axes `abc...`, more being flattened into one.
        flattened: what else is flattened, so that merged collectives find it.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    view: tuple[str, ...] = ()
    flattened: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return self.view or tuple(NAMES[: len(self.sizes)])

    @property
    def view_sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[NAMES.index(name)] for name in axis) for axis in self.axes)

    def make(self, device: str = "cpu") -> DeviceMesh:
        """The mesh; every rank of the world calls this."""
        names = tuple(NAMES[: len(self.sizes)])
        ranks = torch.tensor(self.ranks).reshape(self.sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            root = DeviceMesh(device, ranks, mesh_dim_names=names)
            try:
                return self._views(root)
            except RuntimeError:
                if root.get_coordinate() is None:
                    return root  # on stock, ranks outside of a mesh can't slice it
                raise

    def _views(self, root: DeviceMesh) -> DeviceMesh:
        for group in self.flattened:
            root[tuple(group)]._flatten()
        if self.axes == root.mesh_dim_names:
            return root
        parts = [root[tuple(axis)]._flatten() if len(axis) > 1 else root[axis] for axis in self.axes]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def twin(self) -> MeshTwin:
        root = MeshTwin.of(self.ranks, self.sizes, NAMES[: len(self.sizes)])
        parts = [root.slice(axis).flatten(axis) for axis in self.axes]
        return MeshTwin.concatenate(parts)


@contextlib.contextmanager
def bytes_decide() -> Iterator[object]:
    """Plan as if a collective took no time without data, so that bytes decide on the smallest tensor."""
    from torch_overlay.distributed.tensor._planner import cost
    from torch_overlay.distributed.tensor._runner.answers import forget_answers

    free, assumed = cost.Cost(latency=0.0, bandwidth=1e9), cost._ASSUMED
    forget_answers()  # plans are remembered, by their questions alone
    cost._ASSUMED = {"cpu": free}
    try:
        yield free
    finally:
        cost._ASSUMED = assumed
        forget_answers()


@dataclass(frozen=True)
class Case:
    """A redistribution over a mesh of real ranks."""

    mesh: MeshRecipe
    source: tuple
    target: tuple
    shape: tuple[int, ...]
    dtype: str = "float32"
    source_order: tuple[int, ...] | None = None
    target_order: tuple[int, ...] | None = None
    flatten: str = "whole"
    contiguous: bool = True
    public: bool = False
    beside: bool = False  # another mesh over all ranks, used by a second thread meanwhile
    bytes_only: bool = False  # see `bytes_decide`

    def problem(self, mesh: DeviceMesh, rank: int) -> str | None:
        """Run it on this rank; what is wrong with the result, or None."""
        coordinate = self.mesh.twin().coordinate(rank)
        if coordinate is None:
            given = torch.empty(0, dtype=self._dtype, device=mesh.device_type)
            return None if self.run(mesh, given).numel() == 0 else "a rank outside of the mesh got something"
        given = self.given(coordinate).to(mesh.device_type)
        before = given.clone()
        result = self.run(mesh, given)
        if not torch.equal(_plain(before), _plain(given)):
            return "the input was written to"
        for axis, (old, new) in enumerate(zip(self.source, self.target, strict=True)):
            if new[0] == "P" and old[0] not in "PR":  # which rank has which term is nobody's business, only their sum
                result = funcol.all_reduce(result.contiguous(), "sum", (mesh, axis))
        return self.difference(result.cpu(), coordinate)

    def run(self, mesh: DeviceMesh, local: torch.Tensor) -> torch.Tensor:
        """The local tensor after it, by the public method or by the function behind it."""
        if self.public:
            strides = tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))
            whole = DTensor.from_local(
                local, mesh, placed(self.source), run_check=False, shape=torch.Size(self.shape), stride=strides
            )
            return whole.redistribute(placements=placed(self.target)).to_local()
        ends = [
            self.spec(mesh, placements, order)
            for placements, order in ((self.source, self.source_order), (self.target, self.target_order))
        ]
        return torch_redistribute.redistribute_local_tensor(local, *ends)

    def spec(self, mesh: DeviceMesh, placements: tuple, order: tuple[int, ...] | None) -> DTensorSpec:
        strides = tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))
        meta = TensorMeta(torch.Size(self.shape), strides, self._dtype)
        if order is None:
            return DTensorSpec(mesh, placed(placements), tensor_meta=meta)
        cut = {d: [a for a in order if placements[a] == ("S", d)] for d in range(len(self.shape))}
        entry = torch.distributed.tensor._dtensor_spec.ShardOrderEntry
        shard_order = tuple(entry(tensor_dim=d, mesh_dims=tuple(axes)) for d, axes in cut.items() if axes)
        return DTensorSpec(mesh, placed(placements), tensor_meta=meta, shard_order=shard_order)

    def given(self, coordinate: tuple[int, ...]) -> torch.Tensor:
        """What the rank at a coordinate starts with."""
        place = tuple(coordinate[a] for a in self._pending)
        local = self._cut(self._terms()[place], self.source, coordinate, self.source_order).to(self._dtype)
        if self.contiguous or local.ndim < 2:
            return local.contiguous()
        return local.transpose(0, -1).contiguous().transpose(0, -1)

    def expected(self, coordinate: tuple[int, ...]) -> torch.Tensor:
        """What it must hold in the end, in a wider type."""
        whole, axis = self._terms(), 0
        for mesh_axis in self._pending:
            if self.target[mesh_axis][0] == "P":
                whole = whole.select(axis, coordinate[mesh_axis])
            else:
                axis += 1
        # What is left in front are the pending axes that end.
        for mesh_axis in [a for a in self._pending if self.target[a][0] != "P"]:
            whole = reduce_first(self.source[mesh_axis][1], whole)
        for mesh_axis, (old, new) in enumerate(zip(self.source, self.target, strict=True)):
            if (old[0], new) == ("R", ("P", "sum")):  # torch's terms: of n equal ones each is the n-th part
                whole = whole / self.mesh.view_sizes[mesh_axis]
        return self._cut(whole, self.target, coordinate, self.target_order)

    def difference(self, result: torch.Tensor, coordinate: tuple[int, ...]) -> str | None:
        """What is wrong with a result on the rank at a coordinate, or None."""
        expected = self.expected(coordinate)
        if tuple(result.shape) != tuple(expected.shape):
            return f"at {coordinate}: shape {tuple(result.shape)} instead of {tuple(expected.shape)}"
        if not self._divides and result.dtype is not self._dtype:
            return f"at {coordinate}: {result.dtype} instead of {self._dtype}"
        got = result.to(expected.dtype)
        tolerance = 1e-2 if self.dtype in ("bfloat16", "float16") else 1e-5
        if torch.equal(got, expected) or (self._divides and torch.allclose(got, expected, tolerance, 1e-6)):
            return None
        return f"at {coordinate}: {result.tolist()} instead of {expected.tolist()}"

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def _pending(self) -> list[int]:
        return [axis for axis, placement in enumerate(self.source) if placement[0] == "P"]

    @property
    def _divides(self) -> bool:
        old, new = ([p[1] for p in placements if p[0] == "P"] for placements in (self.source, self.target))
        return "avg" in old or len(new) > len([a for a in self._pending if self.target[a][0] == "P"])

    def _terms(self) -> torch.Tensor:
        """Every term of every element: the pending axes in front, then the tensor's dims."""
        counts = tuple(self.mesh.view_sizes[a] for a in self._pending)
        ops = frozenset(self.source[a][1] for a in self._pending)
        return _terms(counts, ops, self.shape, self.dtype, self._divides).clone()

    def _cut(self, whole: torch.Tensor, placements: tuple, coordinate: tuple[int, ...], order) -> torch.Tensor:
        for dim, row in enumerate(_rows(placements, self.shape, self.mesh.view_sizes, coordinate, order)):
            whole = whole.index_select(dim, row)
        return whole


@functools.lru_cache(4096)
def _rows(*question) -> list[torch.Tensor]:
    """`rows` as tensors; one coordinate asks of all pairs of placements in turn."""
    return [torch.tensor(row, dtype=torch.int64) for row in rows(*question)]


@functools.lru_cache(64)
def _terms(
    counts: tuple[int, ...], ops: frozenset[str], shape: tuple[int, ...], dtype: str, divides: bool
) -> torch.Tensor:
    """Terms that are all different as far as the type can hold their reduction exactly, so that another, a missing or
    a doubled one shows.

    Args:
        counts: the sizes of the pending axes.
        ops: their reductions.
        divides: whether a reduction divides, so that whole numbers don't stay whole.
    """
    limit = EXACT.get(dtype, 2**20)
    if not counts and dtype != "bool":
        limit *= 8
    if "product" in ops:
        limit = 2 if dtype in EXACT else 7
    seeds = torch.arange(math.prod(shape), dtype=torch.int64) * 2654435761 + 97
    terms = torch.empty((*counts, *shape), dtype=torch.int64)
    for place in itertools.product(*map(range, counts)):
        mixed = seeds
        for p in place:
            mixed = (mixed ^ (p + 1) * 40503) * 1103515245 + 12345
        terms[place] = ((mixed >> 16) % limit + ("product" in ops)).reshape(shape)
    if getattr(torch, dtype).is_complex:
        return torch.complex(terms.double(), (terms * 3 + 1).double() % 1024)
    whole = ops & BITWISE.keys() or (dtype in ("int64", "int32") and not divides)
    return terms if whole else terms.double()


def placed(placements: tuple) -> tuple:
    """Pairs as torch's placements."""
    return tuple(TORCH[kind](*rest) for kind, *rest in placements)


def reduce_first(op: str, terms: torch.Tensor) -> torch.Tensor:
    """The reduction over the first dim."""
    if op in BITWISE:
        return functools.reduce(BITWISE[op], terms.unbind(0))
    plain = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}
    return plain[op](terms, 0)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
