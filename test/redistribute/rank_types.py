"""Every type with every reduction, against torch as it is: where stock is right, so is the overlay, and where stock is
wrong or refuses, the overlay is right or refuses."""

import contextlib
import functools
import itertools

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mesh_ranks import WORLD, make_root
from on_device import from_host
from way import needs_package
from width import sample

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TYPES = (*WHOLE, *FLOATS, torch.complex64, torch.complex128)
OPS = ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")
TARGETS = ((R, R), (S0, R), (R, S0), (S0, S0), (S0, S1), (S1, S0))
SIZES = (4, 2)
SHAPE = (8, 8)


def sources():
    """One reduction over one axis or both, an average beside a sum, and terms of shards."""
    for op in OPS:
        yield from ((Partial(op), Partial(op)), (Partial(op), R), (R, Partial(op)), (Partial(op), S1))
    yield from ((Partial("sum"), Partial("avg")), (Partial("avg"), Partial("sum")))


@from_host
def terms(dtype: torch.dtype) -> torch.Tensor:
    """What each rank has of the whole tensor, all different; of whole numbers, up to the largest. Of each rank of the
    mesh, in wide numbers."""
    made = torch.Generator().manual_seed(1)
    if dtype is torch.bool:
        return torch.randint(0, 2, (*SIZES, *SHAPE), generator=made)
    if dtype in WHOLE:
        limits = torch.iinfo(dtype)
        low, high = (max(limits.min, -(2**59)), min(limits.max, 2**59))  # 8 of these can be added up
        return torch.randint(low, high + 1, (*SIZES, *SHAPE), generator=made)
    real = torch.randint(1, 3, (*SIZES, *SHAPE), generator=made).double()
    return torch.complex(real, real.flip(-1) - 1) if dtype.is_complex else real


def reduced(op: str, given: torch.Tensor, axis: int) -> torch.Tensor:
    bits = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
    if op in bits:
        return functools.reduce(bits[op], given.unbind(axis))
    plain = {"sum": torch.sum, "avg": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}
    return plain[op](given, axis)


def refused(op: str, dtype: torch.dtype) -> bool:
    """What has no answer."""
    return op not in ("sum", "avg") if dtype.is_complex else dtype in FLOATS and op.startswith("b")


def expected(source, dtype: torch.dtype) -> torch.Tensor | None:
    """The whole tensor; None where there is none. An average of whole numbers is its whole part, one of truths is true
    where any of them is."""
    ops = [placement.reduce_op if placement.is_partial() else None for placement in source]
    if any(op is not None and refused(op, dtype) for op in ops):
        return None
    whole, count = terms(dtype), 1
    for axis in (1, 0):
        whole = whole[(slice(None),) * axis + (0,)] if ops[axis] is None else reduced(ops[axis], whole, axis)
        count *= SIZES[axis] if ops[axis] == "avg" else 1
    if dtype is torch.bool:
        return whole != 0
    return whole.div(count, rounding_mode="trunc" if dtype in WHOLE else None).to(dtype)


def cut(whole: torch.Tensor, placements, coordinate) -> torch.Tensor:
    for placement, size, place in zip(placements, SIZES, coordinate):
        if isinstance(placement, Shard):
            whole = whole.chunk(size, placement.dim)[place]
    return whole


def given(mesh, source, dtype: torch.dtype) -> DTensor:
    """What this rank has of it; on an axis without terms, all have what the first one has."""
    here = mesh.get_coordinate()
    place = tuple(here[axis] if placement.is_partial() else 0 for axis, placement in enumerate(source))
    local = cut(terms(dtype)[place].to(dtype), source, here).contiguous()
    return DTensor.from_local(local, mesh, source, run_check=False, shape=torch.Size(SHAPE), stride=(SHAPE[1], 1))


def outcome(mesh, source, target, dtype: torch.dtype) -> str:
    """Whether a redistribution is ``right`` or ``wrong``, and how, or ``refused``."""
    try:
        found = given(mesh, source, dtype).redistribute(placements=target)
        local = found.to_local()
        local.sum()  # waits for it
    except Exception as error:
        return f"refused: {error}"
    whole = expected(source, dtype)
    if whole is None:
        return f"wrong: {dtype} has no such reduction, and it gave {local.tolist()}"
    wanted = cut(whole, target, mesh.get_coordinate())
    if not found.dtype == local.dtype == wanted.dtype:
        return f"wrong: the types are {found.dtype} and {local.dtype}, not {wanted.dtype}"
    return "right" if torch.equal(local, wanted) else f"wrong: {local.tolist()}, not {wanted.tolist()}"


@contextlib.contextmanager
def overlay_off():
    import torch_overlay

    options = {"check_mesh": torch_overlay.options().check_mesh}
    torch_overlay.disable()
    try:
        yield
    finally:
        torch_overlay.enable(**options)


class TypeCases:
    """Cases for ``EightRanks``."""

    @needs_package  # which it turns off
    def test_every_type_with_every_reduction_as_on_stock(self):
        from torch_overlay.distributed.tensor._planner import regions

        self.assertEqual({*OPS}, {*regions.OPS})  # a new operation belongs into both tables
        for first, flattened in enumerate((True, False)):
            found, every = [], list(sample(itertools.product(TYPES, sources(), TARGETS), 47, 23 * first))
            for off in (overlay_off, contextlib.nullcontext):
                with off():
                    mesh = make_root(range(WORLD), SIZES, ("a", "b"))
                    if flattened:
                        mesh["a", "b"]._flatten("ab")
                    found.append([outcome(mesh, source, target, dtype) for dtype, source, target in every])
            for case, stock, ours in zip(every, *found, strict=True):
                problem = f"{case}, flattened: {flattened}: {ours}; stock: {stock}"
                self.assertFalse(ours.startswith("wrong"), problem)
                self.assertFalse(stock == "right" != ours, problem)
