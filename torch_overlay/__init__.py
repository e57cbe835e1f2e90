"""A better `torch.distributed.device_mesh` and DTensor `redistribute` for a released PyTorch, in place.

``torch_overlay.enable()`` turns it on and ``torch_overlay.disable()`` leaves torch as it was. Importing this imports no
torch; ``python -m torch_overlay run script.py`` runs a program that doesn't know of the overlay under it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not typing's: every Python process under `run` imports this file, and should pay nothing
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any, overload

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from torch.nn import Module
    from typing_extensions import Unpack

    from . import parallel_dims as parallel_dims
    from .choices import Choices
    from .parallel_dims import ParallelMeshes
    from .report import Status
    from .show.drawing import Drawing
    from .show.explanation import Explanation
    from .show.flow import FlowExplanation
    from .transfer import Transfer as Transfer
    from .transfers.descriptions import Piece
    from .transfers.landings import Landings
    from .transfers.meeting import Place
    from .transfers.tensor_files import Checkpoint
    from .typing import Options
    from .version import __version__ as __version__

__all__ = [
    "Transfer",
    "checkpoint",
    "disable",
    "draw",
    "enable",
    "enabled",
    "explain",
    "is_enabled",
    "landings",
    "meet",
    "options",
    "parallel_dims",
    "piece",
    "prepare",
    "private_groups",
    "redistribute",
    "status",
]


def enable(*, strict: bool | None = None, **options: Unpack[Options]) -> Status:
    """Patch torch in this process, and return what was done: one line a patch when printed.

    Every target is recognised before the first is set. An unknown torch release or a target with another body is
    refused (OverlayError), and torch is untouched; ``strict=False`` applies the rows that are recognised and leaves
    the others out.

    Options come from here, else from ``TORCH_OVERLAY_<NAME>``, else they are the defaults, which stand first:

    Args:
        strict: whether all patches are needed; True, unless ``TORCH_OVERLAY_STRICT`` is off.
        share_groups: "names", "ranks" or "off": which axes over the same ranks share a process group.
        create: "members" or "world": which ranks take part in making a group.
        flatten: "whole" or "existing": the groups over several axes that a redistribution may use.
        check_mesh: False or True: whether ranks compare their meshes before they make groups.
        leave_out: () or names of patches to do without: "cross_mesh" (``DTensor.redistribute(device_mesh=other)``),
            "full_state_dict" (gathering and loading full state dicts), "clip_grad_norm" (norms of several meshes).

    Enabling twice is enabling once: the second call only changes the options that it names. What is left out stays so
    until `disable`.

    Raises:
        UnknownRelease: this torch isn't one that the overlay knows.
        ChangedTarget: something to be patched isn't what torch's release has there.
        OptionError: an option that there isn't, or a value that it doesn't take.
    """
    from . import overlay

    return overlay.enable(strict, **options)


def disable(*, force: bool = False) -> None:
    """Put back every object of torch's that was replaced, the same by identity, and remove every one that was added.

    If somebody patched one of these after `enable` (a mode that is still on, another library), ForeignPatch names it
    and nothing changes, since their patch may call ours or bring it back; ``force=True`` puts torch's own there
    nevertheless. Meshes and groups that were made under the overlay keep working.
    """
    from . import overlay

    overlay.disable(force)


def enabled(*, strict: bool | None = None, **options: Unpack[Options]) -> AbstractContextManager[Status]:
    """The overlay for a block of code, then as before: off if it was off, else on with the options that it had.

    It takes what `enable` takes. The overlay belongs to the process, not to a thread. Of blocks in several threads that
    overlap, the last one to end puts back what was there before the first.
    """
    from . import overlay

    return overlay.enabled(strict, **options)


def is_enabled() -> bool:
    """Whether the overlay is on in this process."""
    from . import overlay

    return overlay.is_enabled()


def options() -> Choices:
    """The options in force, a frozen value; while the overlay is off, those that `enable` would start from.

    >>> import torch_overlay
    >>> torch_overlay.options().flatten
    'whole'
    """
    from . import overlay

    return overlay.options()


def status() -> Status:
    """What the overlay does in this process: each patch, what was counted, the options. Print it.

    Of each `Transfer` that is in a run it says the step and the ranks that are waited for: call it from another thread.
    Where one has waited for some seconds it asks the other ranks, which takes up to three more.
    """
    from . import overlay

    return overlay.status()


if TYPE_CHECKING:

    @overload
    def explain(tensors: DTensor, placements: Sequence[Placement] | str, out: str | None = None) -> Explanation: ...

    @overload
    def explain(
        tensors: DTensor,
        placements: Any,
        out: str | None = None,
        *,
        device_mesh: DeviceMesh,
        budget: int = ...,
    ) -> FlowExplanation: ...

    @overload
    def explain(
        tensors: Mapping[Any, Any] | list[Any] | tuple[Any, ...],
        placements: Any,
        out: str | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        budget: int = ...,
    ) -> FlowExplanation: ...

    @overload
    def explain(tensors: Transfer, *, out: str | None = None) -> FlowExplanation: ...


def explain(
    tensors: Any,
    placements: Any = None,
    out: str | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    budget: int = 256 << 20,
) -> Explanation | FlowExplanation:
    """What a redistribution does under the overlay. Nothing is sent.

    Of one DTensor, `tensor.redistribute(placements=placements)`: its plan, step by step, with bytes, time and why.
    Of a tree, or to another mesh, ``torch_overlay.redistribute(tensors, device_mesh, placements)``; of a `Transfer`,
    its `run`: how many exchanges, and who sends how much to whom. Each process finds that for all ranks.

    Args:
        tensors: a DTensor (or anything with its `_spec`), a tree of them, or a Transfer.
        placements: torch's, one for each axis of the mesh, or, of one tensor, words: ``"R,S1"``. Of more than one or
            to another mesh, all that `redistribute` takes.
        out: a file to draw who sends what to whom in; its ending chooses the format. Needs matplotlib.
        device_mesh, budget: see `redistribute`.

    Returns:
        A value. Print it.

    Raises:
        TypeError: no DTensor.
        ValueError: the placements don't fit the tensor or its mesh, or can't be drawn.
    """
    from .show.asked import of_anything

    found = of_anything(tensors, placements, device_mesh, budget)
    if out is not None:
        found.save(out)
    return found


def draw(mesh: DeviceMesh | ParallelMeshes, out: str | None = None, gpus_per_host: int = 8) -> Drawing:
    """A mesh: its ranks, the hosts they sit on and each axis's groups. Nothing is sent.

    Args:
        mesh: or all meshes of a run, as `ParallelDims.build` gives them.
        out: a file to draw it in, too; its ending chooses the format. Needs matplotlib.
        gpus_per_host: ranks are on hosts in their order, this many on each.

    Returns:
        The same for the terminal. Print it.

    Raises:
        TypeError: not a mesh.
        ValueError: no GPU on a host, or more ranks than a picture can show.
    """
    from .show.drawing import Drawing

    found = Drawing.of(mesh, gpus_per_host)
    if out is not None:
        found.save(out)
    return found


def private_groups() -> AbstractContextManager[None]:
    """Give the meshes that are made inside groups that no other mesh shares, for one block of code.

    Views of such a mesh that are made later, copies and pickles keep it, and redistributions over them use no group
    from outside, not even the default one.

    A block doesn't reach into other threads, be they started inside or before; one that makes a mesh meanwhile is
    warned that it isn't private. There, use it as a decorator.

    >>> with torch_overlay.private_groups():  # doctest: +SKIP
    ...     second = init_device_mesh("cpu", (8,))  # its all-gathers run beside those of the first mesh
    >>> pool.submit(torch_overlay.private_groups()(init_device_mesh), "cpu", (8,))  # doctest: +SKIP
    """
    from .distributed._mesh import universe

    return universe.private_groups()


def prepare(mesh: DeviceMesh) -> None:
    """Make a group for each set of two or more axes of a mesh, which redistributions over them then use.

    Collective: all ranks of the mesh call it, and all ranks of the world where these make every group. A mesh of n axes
    of more than one rank has 2^n - n - 1 such sets. On NCCL a group takes memory from its first collective on.

    Raises:
        RuntimeError: the mesh has no groups, is a private view of a mesh that isn't private, or a member didn't take
            part within the timeout.
    """
    from .distributed._mesh import groups

    groups.prepare(mesh)


def meet(address: str, *, rank: int, world_size: int, key: str | bytes | None = None, timeout: float = 300.0) -> Place:
    """Meet processes of other torch.distributed worlds, or of none: a place, for ``Transfer(group=place)``.

    Collective over all that meet, each with another rank; a mesh is there with all of its ranks. Errors, ``gone`` and
    ``traffic`` speak of the ranks of the place. A process that was started again meets again, with all others, when
    rank 0 closed the place. None of torch's groups is used, and no default group is needed.

    Args:
        address: ``tcp://host:port``, where rank 0 listens, there alone.
        rank, world_size: of this process here, and how many meet.
        key: signs what ranks say, and isn't sent: the same for all, or ``TORCH_OVERLAY_MEET_KEY``. Without one, whoever
            reaches the port is believed. Tensors travel by gloo or NCCL, whose connections know no keys.
        timeout: seconds that ranks of the place wait for one another.

    Raises:
        ValueError: an address or a rank that can't be, a rank that is there already, or another key.
        RuntimeError: a rank didn't come in time; says which. Or rank 0 can't listen there.

    >>> import torch, torch_overlay
    >>> with torch_overlay.meet("tcp://127.0.0.1:29613", rank=0, world_size=1) as place:
    ...     source, target = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    ...     with torch_overlay.Transfer(source, target, group=place) as sync:
    ...         sync.run()
    >>> target["w"]
    tensor([1., 1.])
    """
    from .overlay import require_recognised
    from .transfers.meeting import Place

    require_recognised()
    return Place(address, rank, world_size, key, timeout)


def piece(local: Tensor, shape: Sequence[int], start: Sequence[int]) -> Piece:
    """A box of a whole tensor, held by a plain one, for a `Transfer`: of a fused weight, an expert, a ragged shard.

    A tensor of a source or a target may be one piece or a tuple of pieces on each rank, whatever the others have.

    Args:
        local: what this rank holds of it, or writes into; any view.
        shape: of the whole, in elements.
        start: the first element of the box, along each dim.

    Raises:
        TypeError: not a plain tensor.
        ValueError: the box isn't inside the whole, or has another number of dims.

    >>> import torch, torch_overlay
    >>> qkv = torch.zeros(12, 8)  # on each of two ranks half of the heads: 4 rows of q, 4 of k and 4 of v
    >>> {name: torch_overlay.piece(qkv[at : at + 4], (8, 8), (4, 0)) for name, at in (("q", 0), ("k", 4), ("v", 8))}
    {'q': piece((4, 8), (8, 8), (4, 0)), 'k': piece((4, 8), (8, 8), (4, 0)), 'v': piece((4, 8), (8, 8), (4, 0))}
    """
    from .transfers.descriptions import Piece

    return Piece(local, shape, start)


def checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """A folder of safetensors files, as the source of a `Transfer`: it is read once by all ranks together, each byte by
    one of them, however the targets are cut.

    The ranks that give it read equal shares, in rounds that take half of the Transfer's budget; ranks that give None
    read nothing. The files are those that ``model.safetensors.index.json`` lists, else all that end in
    ``.safetensors``. The headers are read when a Transfer is made; the tensors when it runs, without a memory map. The
    safetensors package isn't needed.

    Making a Transfer raises a ValueError on all ranks, before anything is written, if the folder, its index or a file
    isn't what it has to be, or if readers see different files; it names the file, and the tensor. A run raises if a
    file has another size or time than when its header was read: a ValueError before anything is sent, a RuntimeError,
    which says whether targets were written, later.

    Args:
        folder: where the files are, on each rank that gives it. It isn't looked at before a Transfer is made.

    >>> import json, struct, tempfile, torch, torch_overlay
    >>> header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(f"{folder}/model.safetensors", "wb") as file:
    ...         _ = file.write(struct.pack("<Q", len(header)) + header + struct.pack("<4f", 1, 2, 3, 4))
    ...     state = {"w": torch.zeros(2, 2, dtype=torch.float64)}
    ...     with torch_overlay.meet("tcp://127.0.0.1:29625", rank=0, world_size=1) as place:  # or in a process group
    ...         torch_overlay.Transfer(torch_overlay.checkpoint(folder), state, group=place).run()
    >>> state["w"]
    tensor([[1., 2.],
            [3., 4.]], dtype=torch.float64)
    """
    from .transfers.tensor_files import Checkpoint

    return Checkpoint(folder)


def landings(
    load: Callable[[Iterable[tuple[str, Tensor]]], object],
    model: Module,
    tensors: Mapping[str, Tensor] | Iterable[Any],
    depends_on: Any = None,
) -> Landings:
    """Where a model's own loader puts each tensor of a checkpoint on this rank, for a `Transfer` into the model.

    The loader runs on tensors without memory, and what it would copy into the model is written down; the model stays as
    it is. A tensor that the loader only cuts, turns, copies and casts is direct: its boxes are pieces over the model's
    memory. One that the loader computes with comes whole, and ``load_whole()`` hands it to the loader. What isn't
    certain comes whole, too. Not collective.

    Args:
        load: takes pairs of a name and a whole tensor, as `load_weights` of vLLM's and SGLang's models does.
        model: whose parameters and buffers it writes.
        tensors: of the checkpoint: a mapping of names to tensors (on meta, or anything with a shape and a dtype), such
            pairs, or values with a name, a dtype and a shape.
        depends_on: what else decides where the loader puts things, as the map of experts to ranks: a tensor, a tree, or
            a function that returns one. `Landings.stale` says when it has changed.

    Returns:
        Landings: `direct`, `whole`, `skipped`, `untouched`, and `target()` for the `Transfer`.

    Raises:
        ValueError: the loader doesn't take some tensors, alone or together with all others, since it doesn't know their
            names for example; names them. Or two have one name.
        TypeError: no tensors by name, or the model's parameters are DTensors.

    >>> import torch, torch_overlay
    >>> model = torch.nn.Linear(8, 6, bias=False)  # q, k and v in one weight
    >>> rows = {"q": slice(0, 2), "k": slice(2, 4), "v": slice(4, 6)}
    >>> def load(weights):
    ...     for name, weight in weights:
    ...         model.weight.data[rows[name]].copy_(weight)
    >>> found = torch_overlay.landings(load, model, {name: torch.empty(2, 8, device="meta") for name in rows})
    >>> found.direct["k"], found.as_data()["direct"]["k"][0]["offset"]
    ((piece((2, 8), (2, 8), (0, 0)),), 16)
    >>> found.whole, found.untouched
    ({}, {})
    """
    from .transfers.landings import find_landings

    return find_landings(load, model, tensors, depends_on)


def redistribute(
    tensors: Any, device_mesh: DeviceMesh | None = None, placements: Any = None, *, budget: int = 256 << 20
) -> Any:
    """The same tensors with other placements, all of them in as few exchanges as the budget allows.

    Collective over the ranks of the tensors' meshes and of the target's. All of them give the same tree. On one mesh,
    ranks talk along the axes on which some placement changes, by the mesh's own groups. To another mesh, all ranks of
    both take part, by a group that is made by the first such call; a rank outside of a mesh holds nothing of a tensor
    on it. Gradients flow back the same way, so all of these ranks have to ask for them.

    Args:
        tensors: a DTensor, or dicts, lists and tuples of them, nested as they come. What isn't a DTensor stays.
        device_mesh: where they shall be; each stays on its own mesh if none is given.
        placements: one for all axes, one for each axis, a tree of these like `tensors`, or a function of the name (the
            keys on the way, joined by dots) and the tensor.
        budget: the bytes that buffers may take on a rank.

    Returns:
        The same structure. A tensor that is there already is given back as it is.

    Raises:
        ValueError: placements that don't fit a tensor, or a budget that is too small.
        TypeError: placements that are none.

    >>> full = torch_overlay.redistribute(model.state_dict(), placements=Replicate())  # doctest: +SKIP
    """
    from .overlay import require_recognised
    from .transfers import redistribution

    require_recognised()
    return redistribution.redistribute(tensors, device_mesh, placements, budget=budget)


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """What people use by its name, a module or a class, imported when it is first asked for."""
        if name == "Transfer":
            from .transfer import Transfer

            return Transfer
        if name == "parallel_dims":
            import importlib

            return importlib.import_module(f"{__name__}.{name}")
        if name == "__version__":
            from .version import __version__

            return __version__
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
