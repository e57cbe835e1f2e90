"""`Transfer` and `redistribute` of trees against whole tensors: casts, pieces, budgets, lifetimes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import Check, Found, Run, asked

TREE = {  # a shape, and the placements of the source and of the target
    "uneven": ((13, 8), "S0 S1", "R R"),
    "large": ((512, 1024), "S1 R", "S0 S0"),
    "row": ((7,), "R R", "S0 R"),
    "turned": ((64, 48), "S0 S0", "S1 S0"),
}
CASTS = (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float64", "float32"))
OPTIONS: dict[str, dict[str, Any]] = {
    "changes": {"changes": True},
    "changes in the host's memory": {"changes": "cpu"},
    "relay": {"relay": True},
    "keep": {"keep": True},
    "keep, by many exchanges": {"keep": True, "budget": 200_000},
    "stages": {"staged": True},
    "stages, and changes": {"staged": True, "changes": True},
}
BYTES = ("float8_e4m3fn", "float8_e5m2", "bool", "complex64", "complex128", "int16", "uint8", "int64")


def nccl_transfer(run: Run) -> Iterator[Found]:
    """By NCCL if it works here; types that gloo doesn't reduce; then a part of a world that is bound to its device."""
    functions = (casts, pieces, budgets, pending_sums, part_of_the_mesh, used_and_freed_at_once)
    checks = [Check(function) for function in functions]
    yield from asked(run, [*checks, Check(on_a_stream, needs_gpu=True), Check(types)], run.best)
    bound = [Check(budgets, needs_gpu=True), Check(part_of_the_mesh, needs_gpu=True)]
    yield from asked(run, bound, run.best, bound=not run.dry)


def options(run: Run) -> Iterator[Found]:
    checks = [Check(with_option, (name,)) for name in OPTIONS]
    yield from asked(run, [*checks, Check(verified), Check(a_checkpoint)], run.best)


# --- on every rank


def _whole(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Numbers that every type here holds as they are; of bytes and bits any."""
    kind = getattr(torch, dtype)
    numbers = torch.randint(0, 2 if dtype == "bool" else 8, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(kind)


def _cut(whole: torch.Tensor, mesh: Any, codes: str) -> Any:
    """The DTensor of a whole tensor, cut on each rank by itself, and so without the code under test."""
    from benchmarks.pairs import placements
    from torch.distributed.tensor import distribute_tensor

    wide = whole.view(torch.uint8) if whole.dtype.itemsize == 1 else whole  # torch can't split some types
    cut = distribute_tensor(wide.to(mesh.device_type), mesh, placements(tuple(codes.split())), src_data_rank=None)
    if wide is whole:
        return cut
    local = cut.to_local().view(whole.dtype)
    return type(cut).from_local(
        local, mesh, cut.placements, run_check=False, shape=whole.shape, stride=tuple(cut.stride())
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.cpu().contiguous(), other.cpu().contiguous()
    return one.dtype == other.dtype and one.shape == other.shape and _bits(one).equal(_bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _moved(mesh: Any, dtype: str, to: str | None = None, seed: int = 0, **how: Any) -> str | None:
    """Run a Transfer of the tree twice, the second time with other values, and compare what came with the whole."""
    from torch_overlay import Transfer

    wholes = {name: _whole(shape, dtype, seed) for name, (shape, *_) in TREE.items()}
    source = {name: _cut(whole, mesh, TREE[name][1]) for name, whole in wholes.items()}
    target = {
        name: _cut(torch.zeros_like(whole, dtype=getattr(torch, to or dtype)), mesh, TREE[name][2])
        for name, whole in wholes.items()
    }
    wrong = []
    least, given = how.pop("least", 0), target
    if how.pop("staged", False):  # on meta; when one has come, it is copied to where the others come
        given = {name: _on_meta(tensor) for name, tensor in target.items()}

        def land(came: dict[str, Any]) -> None:
            for name, tensor in came.items():
                target[name].copy_(tensor)

        how["stages"] = [([name], land) for name in given]
    with Transfer(source, given, **how) as sync:
        if sync.exchanges < least:
            wrong.append(f"{sync.exchanges} exchanges, not {least} or more")
        for again in range(2):
            if again:
                wholes = {name: _whole(tuple(whole.shape), dtype, seed + 1) for name, whole in wholes.items()}
                for name, whole in wholes.items():
                    source[name].to_local().copy_(_cut(whole, mesh, TREE[name][1]).to_local())
            sync.run()
            came = {name: tensor.to_local().clone() for name, tensor in target.items()}  # used at once
            for name, whole in wholes.items():
                if not _same(came[name], _cut(whole.to(came[name].dtype), mesh, TREE[name][2]).to_local()):
                    wrong.append(f"{name}, {dtype} to {to or dtype}, run {again + 1}")
    return "; ".join(wrong) or None


def _on_meta(tensor: Any) -> Any:
    lies = tensor.device_mesh, tensor.placements
    local = tensor.to_local().to("meta")
    return type(tensor).from_local(local, *lies, run_check=False, shape=tensor.shape, stride=tensor.stride())


def casts(mesh: Any, rank: int) -> str | None:
    return "; ".join(filter(None, [_moved(mesh, old, new) for old, new in CASTS])) or None


def types(mesh: Any, rank: int) -> str | None:
    return "; ".join(filter(None, [_moved(mesh, dtype) for dtype in BYTES])) or None


def with_option(mesh: Any, rank: int, name: str) -> str | None:
    return _moved(mesh, "float32", "bfloat16", **OPTIONS[name])


def verified(mesh: Any, rank: int) -> str | None:
    from torch_overlay import Transfer

    whole = _whole((64, 48), "float32")
    source, target = {"w": _cut(whole, mesh, "S0 S1")}, {"w": _cut(torch.zeros_like(whole), mesh, "S1 R")}
    with Transfer(source, target) as sync:
        sync.run()
        sync.verify()
        if rank == 2:
            target["w"].to_local()[3, 5] += 1
        try:
            sync.verify()
        except ValueError as error:
            return None if "the target 'w' of rank 2 differs" in str(error) else str(error)
    return "no error"


def a_checkpoint(mesh: Any, rank: int) -> str | None:
    import tempfile

    from rank_checkpoint import write_folder
    from torch_overlay import Transfer, checkpoint

    wholes = {name: _whole(shape, "float32", number) for number, (name, (shape, *_)) in enumerate(TREE.items())}
    target = {name: _cut(torch.zeros_like(whole), mesh, TREE[name][2]) for name, whole in wholes.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder, wholes, files=2)
        with Transfer(checkpoint(folder), target, budget=16 << 20) as sync:
            sync.run()
    wrong = [
        name
        for name, whole in wholes.items()
        if not _same(target[name].to_local(), _cut(whole, mesh, TREE[name][2]).to_local())
    ]
    return "; ".join(wrong) or None


def budgets(mesh: Any, rank: int) -> str | None:
    return _moved(mesh, "float32", budget=200_000, least=4)


def pieces(mesh: Any, rank: int) -> str | None:
    """Shards into two halves of a fused tensor, cast, on every rank; and a block that goes round from there."""
    from torch_overlay import Transfer, piece

    whole, device = _whole((12, 10), "float32"), mesh.device_type
    fused = torch.zeros(2, 12, 5, dtype=torch.bfloat16, device=device)
    halves = tuple(piece(fused[part], (12, 10), (0, 5 * part)) for part in range(2))
    ranks = mesh.mesh.flatten().tolist()
    rows = [torch.zeros(1, 10, device=device) for _ in range(ranks.index(rank), 12, len(ranks))]
    round_ = tuple(piece(row, (12, 10), (ranks.index(rank) + n * len(ranks), 0)) for n, row in enumerate(rows))
    for source, target in ((_cut(whole, mesh, "S0 S1"), halves), (halves, round_)):
        with Transfer({"w": source}, {"w": target}) as sync:
            sync.run()
    if not _same(torch.cat([*fused], 1), whole.bfloat16()):
        return "halves of a fused tensor came otherwise"
    return (
        None if _same(torch.cat(rows), whole[ranks.index(rank) :: len(ranks)]) else "rows that go round came otherwise"
    )


def pending_sums(mesh: Any, rank: int) -> str | None:
    import torch_overlay

    whole = _whole((64, 64), "float32")
    source, wanted = _cut(whole, mesh, "P S0"), _cut(whole, mesh, "S1 R")
    source.to_local().copy_(_cut(whole, mesh, "R S0").to_local())
    tree = {"w": source, "moved": _cut(whole, mesh, "S0 S1")}
    moved = torch_overlay.redistribute(tree, placements=wanted.placements, budget=30_000)
    if not _same(moved["moved"].to_local(), wanted.to_local()):
        return "other values"
    return None if _same(moved["w"].to_local(), _cut(whole * 2, mesh, "S1 R").to_local()) else "other sums"


def used_and_freed_at_once(mesh: Any, rank: int) -> str | None:
    """Inputs go right after the call and their memory to others, while collectives may still read it."""
    import torch_overlay

    wrong = []
    for turn in range(8):
        whole = _whole((512, 256), "float32", turn)
        tree = {"a": _cut(whole, mesh, "S0 S1"), "b": _cut(whole, mesh, "S1 S0")}
        alone = tree["a"].redistribute(mesh, tree["b"].placements)
        moved = torch_overlay.redistribute(tree, placements=_cut(whole, mesh, "R S0").placements)
        sizes = [tensor.to_local().shape for tensor in tree.values()]
        del tree
        junk = [torch.full(size, torch.nan, device=mesh.device_type) for size in sizes for _ in range(4)]
        sums = [tensor.to_local() + 1 for tensor in (*moved.values(), alone)]
        del moved, alone, junk
        wanted = [_cut(whole + 1, mesh, codes).to_local() for codes in ("R S0", "R S0", "S1 S0")]
        wrong += [f"turn {turn}, result {n}" for n, two in enumerate(zip(sums, wanted)) if not _same(*two)]
    return "; ".join(wrong) or None


def on_a_stream(mesh: Any, rank: int) -> str | None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        problem = _moved(mesh, "float32", budget=400_000)
    stream.synchronize()
    return problem


def part_of_the_mesh(mesh: Any, rank: int) -> str | None:
    from torch.distributed.device_mesh import DeviceMesh

    from torch_overlay import Transfer

    two = DeviceMesh(mesh.device_type, [0, 2], mesh_dim_names=("t",))
    whole = _whole((9, 8), "float32")
    target = _cut(torch.zeros(9, 8), two, "S0") if rank in (0, 2) else None
    with Transfer({"w": _cut(whole, mesh, "S1 S0")}, {"w": target}) as sync:
        sync.run()
    if target is None:
        return None
    back = _cut(torch.zeros(9, 8), two, "R")
    with Transfer({"w": target}, {"w": back}, group=[0, 2]) as sync:
        sync.run()
    return None if _same(back.to_local(), whole) else "another tensor came"
