"""A better `torch.distributed.device_mesh` and DTensor `redistribute` for a released PyTorch, in place.

``torch_overlay.enable()`` turns it on and ``torch_overlay.disable()`` leaves torch as it was. Importing this imports no
torch; ``python -m torch_overlay run script.py`` runs a program that doesn't know of the overlay under it.
"""

from __future__ import annotations

# Not typing's: under `run` every Python process of a job imports this file, compile workers and data loaders too, and
# importing typing would cost them more than all the rest of it.
TYPE_CHECKING = False
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
    from .loading.landings import Landings
    from .parallel_dims import ParallelMeshes
    from .rendezvous.place import Place
    from .report import Status
    from .show.drawing import Drawing
    from .show.explanation import Explanation
    from .show.flow import FlowExplanation
    from .transfer import Transfer as Transfer
    from .transfers.pieces import Piece
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
    "join",
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
    refused (OverlayError), and torch is untouched; ``strict=False`` applies the rows that are recognised and leaves the
    others out.

    An option that isn't given here comes from ``TORCH_OVERLAY_<NAME>``; without that it has its default, the value that
    is listed first.

    Args:
        strict: whether all patches are needed. True by default, unless ``TORCH_OVERLAY_STRICT`` is off.
        share_groups: "names", "ranks" or "off": which axes over the same ranks share a process group.
        create: "members" or "world": which ranks take part in making a group.
        flatten: "whole" or "existing": the groups over several axes that a redistribution may use.
        check_mesh: False or True: whether ranks compare their meshes before they make groups.
        leave_out: () or names of patches to do without: "cross_mesh" (``DTensor.redistribute(device_mesh=other)``),
            "full_state_dict" (gathering and loading full state dicts), "clip_grad_norm" (norms of several meshes).

    A second call changes the options that it names and keeps the others. `leave_out` can't change before `disable`.

    Raises:
        UnknownRelease: there are no fingerprints of this torch release.
        ChangedTarget: a target has another body than this release of torch has there. In a second call: `strict` is
            True, and the overlay left out some rows when it was turned on.
        OptionError: an unknown option, or a value that the option doesn't take; also one from the environment. In a
            second call: another `leave_out`.
        OverlayError: a part of the overlay can't be imported, or doesn't fit its target. Torch is untouched.
    """
    from . import overlay

    return overlay.enable(strict, **options)


def disable(*, force: bool = False) -> None:
    """Put back every object of torch's that was replaced, the same by identity, and remove every one that was added.
    Does nothing while the overlay is off.

    Meshes and groups that were made under the overlay keep working.

    Args:
        force: put torch's own objects back even where somebody else patched over ours.

    Raises:
        ForeignPatch: somebody patched one of these objects after `enable`: another library, or a mode that is still on.
            Their patch may call ours, or restore it later, so nothing was changed.
        OverlayError: an object couldn't be put back. All others were.
    """
    from . import overlay

    overlay.disable(force)


def enabled(*, strict: bool | None = None, **options: Unpack[Options]) -> AbstractContextManager[Status]:
    """Turn the overlay on for a block of code. At its end the overlay is as before: off, or on with its former options.

    Takes the arguments of `enable`, and raises its errors at the beginning, those of `disable` at the end. If the block
    itself raises, its error is raised, with a note on what `disable` raised. The overlay belongs to the process, not to
    a thread: if blocks of several threads overlap, the last one to end restores what was there before the first. If it
    was turned off inside the block, it stays off.
    """
    from . import overlay

    return overlay.enabled(strict, **options)


def is_enabled() -> bool:
    """Return whether the overlay is on in this process. Under `run` also True before torch is imported, with which it
    goes on."""
    from . import overlay

    return overlay.is_enabled() or overlay.is_awaited()


def options() -> Choices:
    """Return the options in force, a frozen value; while the overlay is off, those that `enable` would start from.
    Then it warns of a variable ``TORCH_OVERLAY_<NAME>`` that names no option.

    Raises:
        OptionError: the overlay is off, and a variable ``TORCH_OVERLAY_<NAME>`` has a value that its option doesn't
            take, names an option of an earlier version, or is misspelt.

    >>> import torch_overlay
    >>> torch_overlay.options().flatten
    'whole'
    """
    from . import overlay

    return overlay.options()


def status() -> Status:
    """Return what the overlay does in this process: its patches, counts, groups and options. Print it.

    Called from another thread during a run of a `Transfer`, it also says in which step the run is, and for which ranks
    it waits. If the run has waited for some seconds, this asks the other ranks, which takes up to three seconds.

    Raises:
        OptionError: as `options`.
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
    """Explain what a redistribution does under the overlay, for all ranks. Nothing is sent.

    For one DTensor: the plan of ``tensor.redistribute(placements=placements)``, each step with its bytes, an estimate
    of its time, and why it is there, beside what stock takes. For a tree, or another mesh: what
    ``torch_overlay.redistribute(tensors, device_mesh, placements)`` sends. For a `Transfer`: what each `run` sends. The
    last two say how many exchanges there are, and who sends how many bytes to whom.

    Args:
        tensors: a DTensor (or anything with its `_spec`), a tree of them, or a Transfer.
        placements: torch's, one for each axis of the mesh; for one tensor also as text, ``"R,S1"``. For a tree or
            another mesh, whatever `redistribute` takes. None for a Transfer.
        out: also draw who sends what to whom to this file. Its ending chooses the format. Needs matplotlib.
        device_mesh, budget: see `redistribute`.

    Returns:
        A value that prints as text.

    Raises:
        TypeError: `tensors` has no DTensor, or `placements` gives something that is no placement.
        ValueError: the placements don't fit a tensor or its mesh, the budget is too small for some rank, two leaves of
            the tree have one name, or the picture can't be drawn. Always for a Transfer of more than 1,024 pieces, of
            which no rank knows what all ranks send.
        ImportError: a picture was asked for, and matplotlib isn't installed.
    """
    from .show.asked import of_anything

    found = of_anything(tensors, placements, device_mesh, budget)
    if out is not None:
        found.save(out)
    return found


def draw(mesh: DeviceMesh | ParallelMeshes, out: str | None = None, gpus_per_host: int = 8) -> Drawing:
    """Draw a mesh: its ranks, the hosts they are on, and the groups of each axis. Nothing is sent.

    Args:
        mesh: a mesh, or all meshes of a run, as `ParallelDims.build` returns them.
        out: also draw a picture to this file, and overwrite it. Its ending chooses the format. Needs matplotlib.
        gpus_per_host: how many ranks are on each host, in the order of their numbers.

    Returns:
        A value that prints as text.

    Raises:
        TypeError: `mesh` isn't a mesh.
        ValueError: `gpus_per_host` is less than 1, a picture would have too many ranks, or matplotlib doesn't know the
            file's ending.
        ImportError: a picture was asked for, and matplotlib isn't installed.
        OSError: the file can't be written.
    """
    from .show.drawing import Drawing

    found = Drawing.of(mesh, gpus_per_host)
    if out is not None:
        found.save(out)
    return found


def private_groups() -> AbstractContextManager[None]:
    """Return a context in which meshes get process groups that no other mesh shares. It also decorates a function.

    Later views, copies and pickles of these meshes keep this property. Redistributions over them use no group from
    outside, not even the default group.

    The block doesn't reach into other threads. A thread that makes a mesh meanwhile is warned that the mesh isn't
    private. To make a private mesh there, decorate the function that makes it.

    >>> with torch_overlay.private_groups():  # doctest: +SKIP
    ...     second = init_device_mesh("cpu", (8,))  # its all-gathers run beside those of the first mesh
    >>> pool.submit(torch_overlay.private_groups()(init_device_mesh), "cpu", (8,))  # doctest: +SKIP
    """
    from .distributed._mesh import universe

    return universe.private_groups()


def prepare(mesh: DeviceMesh) -> None:
    """Make a group for each set of two or more axes of a mesh, which redistributions over them then use.

    Collective: all ranks of the mesh call it; all ranks of the world, where these take part in making every group. A
    mesh of n axes of more than one rank has 2^n - n - 1 such sets. On NCCL a group takes GPU memory from its first
    collective on, but at once in a device-bound world, and in every NCCL world of torch 2.15.

    Raises:
        RuntimeError: the mesh has no groups, is a private view of a mesh that isn't private, or a member didn't take
            part within the timeout.
    """
    from .distributed._mesh import groups

    groups.prepare(mesh)


def meet(
    address: str,
    *,
    rank: int,
    world_size: int,
    key: str | bytes | None = None,
    timeout: float = 300.0,
    open: bool = False,
) -> Place:
    """Meet processes of other torch.distributed worlds, or of none, for a ``Transfer(group=place)`` among them.

    Collective over all processes that meet, each with a rank of its own in the place. Errors, ``gone`` and ``traffic``
    of a `Transfer` use these ranks. If a mesh is to take part, all of its ranks meet. A process that was started again
    can't come back alone, unless the place is open: rank 0 closes it, and all meet again. No group of torch's is used
    or needed.

    Args:
        address: ``tcp://host:port`` of rank 0, which listens there and nowhere else.
        rank: the rank of this process in the place.
        world_size: how many processes meet.
        key: a secret that all processes have; ``TORCH_OVERLAY_MEET_KEY`` if not given. It signs what they say, and
            isn't sent. Without a key, whoever reaches the port is believed. It doesn't protect tensors, which travel
            over gloo or NCCL.
        timeout: seconds that the ranks of the place wait for one another.
        open: whether servers may `join` the place, and leave it, at any time. Those that meet are the trainers. At an
            address that other hosts reach it needs a key.

    Raises:
        ValueError: a malformed address, rank or timeout, an empty key, or another key than rank 0 gave. After the
            timeout, since an earlier place at the address may be about to close: a rank that is there already, or
            another `world_size`.
        RuntimeError: a rank didn't come in time; names it. Or rank 0 can't listen at the address.
        OptionError: an environment variable of torch_overlay is misspelt, or has a wrong value. It is a ValueError.
        UnknownRelease: there are no fingerprints of this torch release, and the overlay is off.

    >>> import torch, torch_overlay
    >>> with torch_overlay.meet("tcp://127.0.0.1:29613", rank=0, world_size=1) as place:
    ...     source, target = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    ...     with torch_overlay.Transfer(source, target, group=place) as sync:
    ...         sync.run()
    >>> target["w"]
    tensor([1., 1.])
    """
    from .choices import from_environment
    from .overlay import require_recognised
    from .rendezvous.place import Place
    from .transfers.options import checked_timeout

    require_recognised()
    from_environment()  # or with a misspelt TORCH_OVERLAY_MEET_KEY nothing would be signed
    return Place(address, rank, world_size, key, checked_timeout(timeout), open)


def join(
    address: str,
    *,
    name: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    key: str | bytes | None = None,
    timeout: float = 300.0,
) -> Place:
    """Join the trainers that met at an open place, as a server, for a ``Transfer(None, target, group=place)``.

    Collective over the ranks of the server, which come and go together. They may be those of a torch.distributed world,
    or of none. Returns when the place has taken note of the server. Making its `Transfer` returns when the trainers'
    next run takes it in, for which it waits as long as the timeout; the first run of the server is that run.

    Args:
        address: that of the trainers' ``meet(open=True)``.
        name: the same on all ranks of the server, and another one than that of other servers. A server that was
            restarted takes the place of its former self by its name. Without a name, a server of one rank gets a new
            one, and the ranks of a world agree on one.
        rank, world_size: of this process in the server.
        key: as the trainers gave it to `meet`.
        timeout: seconds that the ranks of the server wait for one another, and for the trainers.

    Raises:
        ValueError: a malformed address, rank or timeout; several ranks without a name and without a world; the place
            isn't open, or the key isn't the trainers'.
        RuntimeError: nobody listens at the address, or a rank of the server didn't come in time.
        OptionError: an environment variable of torch_overlay is misspelt, or has a wrong value. It is a ValueError.
        UnknownRelease: there are no fingerprints of this torch release, and the overlay is off.

    >>> import torch, torch_overlay
    >>> from threading import Thread
    >>> place = torch_overlay.meet("tcp://127.0.0.1:29614", rank=0, world_size=1, open=True)
    >>> weights = {"w": torch.ones(2)}
    >>> sync = torch_overlay.Transfer(weights, None, group=place)  # no server is there
    >>> served = {"w": torch.zeros(2)}
    >>> def serve():
    ...     with torch_overlay.join("tcp://127.0.0.1:29614", name="server-0") as joined:
    ...         torch_overlay.Transfer(None, served, group=joined).run()
    >>> server = Thread(target=serve)
    >>> server.start()
    >>> while not sync.joined:
    ...     sync.run()
    >>> server.join()
    >>> served["w"], sync.joined
    (tensor([1., 1.]), ('server-0',))
    >>> sync.close(), place.close()
    (None, None)
    """
    from .choices import from_environment
    from .overlay import require_recognised
    from .rendezvous.place import Place
    from .transfers.options import checked_timeout

    require_recognised()
    from_environment()
    return Place.joined(address, name, rank, world_size, key, checked_timeout(timeout))


def piece(local: Tensor, shape: Sequence[int], start: Sequence[int]) -> Piece:
    """Say which box of a larger tensor a plain tensor holds, for a `Transfer`.

    For slices of fused weights, for experts, and for shards that placements can't describe. In a source or a target,
    each rank gives one piece or a tuple of pieces for a tensor, whatever other ranks give.

    Args:
        local: the box, which a run reads or writes. Any view.
        shape: the shape of the whole tensor.
        start: the index of the box's first element, along each dim.

    Raises:
        TypeError: `local` isn't a plain tensor, or a shape or start isn't of whole numbers.
        ValueError: the box isn't inside the whole tensor, or has another number of dims.

    >>> import torch, torch_overlay
    >>> qkv = torch.zeros(12, 8)  # on each of two ranks half of the heads: 4 rows of q, 4 of k and 4 of v
    >>> {name: torch_overlay.piece(qkv[at : at + 4], (8, 8), (4, 0)) for name, at in (("q", 0), ("k", 4), ("v", 8))}
    {'q': piece((4, 8), (8, 8), (4, 0)), 'k': piece((4, 8), (8, 8), (4, 0)), 'v': piece((4, 8), (8, 8), (4, 0))}
    """
    from .transfers.pieces import Piece

    return Piece(local, shape, start)


def checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Return a folder of safetensors files as the source of a `Transfer`. Each byte is read once, by one of the ranks,
    however the targets are cut.

    The ranks that give it read equal shares, in rounds that take half of the Transfer's budget; ranks that give None
    read nothing. The files are those that ``model.safetensors.index.json`` lists, else all that end in
    ``.safetensors``. The headers are read when a Transfer is made; the tensors when it runs, without a memory map. The
    safetensors package isn't needed.

    Making a Transfer raises a ValueError on all ranks, before anything is written, if the folder, its index or a file
    is missing or malformed, or if ranks see different files. It names the file and the tensor. A run raises if a file
    has changed its size or time since its header was read: a ValueError before anything was sent, and a RuntimeError
    later, which says whether targets were written.

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
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Landings:
    """Ask a model's own loader where it puts each tensor of a checkpoint on this rank, for a `Transfer` into the model.

    The loader runs on tensors without memory. What it would copy into the model is recorded and not done, so the model
    stays as it is. If the loader only slices, transposes, copies and casts a tensor, the tensor is direct: it becomes
    pieces over the model's memory. If the loader computes with it, or if that isn't certain, it comes whole, and
    ``load_whole()`` hands it to the loader after each run. Not collective.

    Args:
        load: takes pairs of a name and a whole tensor, as `load_weights` of vLLM's and SGLang's models does.
        model: whose parameters and buffers it writes.
        tensors: of the checkpoint: a mapping of names to tensors (on meta, or anything with a shape and a dtype), such
            pairs, or values with a name, a dtype and a shape.
        depends_on: what else decides where the loader puts tensors, for instance the map of experts to ranks: a tensor,
            a tree, or a function that returns one. `Landings.stale` compares it.
        progress: ``progress(done, all)`` is called at most each half second, while the loader runs: tensors that it has
            taken, over all of its calls. `all` grows if it has to be asked for each tensor alone. An error of it is
            logged.

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
    from .loading.landings import find_landings

    return find_landings(load, model, tensors, depends_on, progress=progress)


def redistribute(
    tensors: Any, device_mesh: DeviceMesh | None = None, placements: Any = None, *, budget: int = 256 << 20
) -> Any:
    """Give many DTensors other placements, on their mesh or on another, in as few exchanges as the budget allows.

    Collective: all ranks of the source and target meshes call it with the same tree. On one mesh, ranks communicate
    along the axes on which some placement changes, over the mesh's own groups. To another mesh, all ranks of both take
    part, over a group that the first such call makes. A rank outside of a mesh holds no elements of a tensor on it.
    Gradients flow back the same way, so all of these ranks have to call backward.

    Args:
        tensors: a DTensor, or nested dicts, lists and tuples of them. Other leaves are returned as they are.
        device_mesh: the target mesh. By default each tensor stays on its own mesh.
        placements: one for all axes, one for each axis, a tree of these like `tensors`, or a function of a name (the
            keys on the path, joined by dots) and the tensor. Always needed, also with `device_mesh`.
        budget: the bytes that buffers may take on a rank. If ranks give different budgets, all use the smallest. A rank
            may give another one than before if all ranks do.

    Returns:
        The same structure. A tensor that has the mesh and the placements already is returned as it is.

    Raises:
        ValueError: the placements don't fit a tensor, or a tree of them has none for it; two leaves have one name; a
            tensor can't be reduced or can't go to that mesh, its local tensor isn't what its placements say, or the
            budget is too small. On all ranks: they ask for different tensors or placements, which is compared when
            these are first moved so.
        TypeError: something in `placements` isn't a placement, or they aren't given for a single DTensor.
        RuntimeError: another rank has such a problem, this rank is in neither of two meshes, or communication failed.
        Exception: `NotPlanned` of the planner: a shard that goes to another mesh is no box, or its reduction isn't one
            of torch's `Partial`.
        UnknownRelease: there are no fingerprints of this torch release, and the overlay is off.

    >>> full = torch_overlay.redistribute(model.state_dict(), placements=Replicate())  # doctest: +SKIP
    """
    from .overlay import require_recognised
    from .transfers import redistribution

    require_recognised()
    return redistribution.redistribute(tensors, device_mesh, placements, budget=budget)


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import what people use by its name, a module or a class, when it is first asked for.

        Raises:
            AttributeError: the package has no such name.
        """
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
    """Return the names of this module, also those that `__getattr__` imports."""
    return sorted({*globals(), *__all__})
