"""What each rank says of its tensors before a transfer, put together and compared.

A rank knows the tensors that it has a part in. With pipeline stages or with two disjoint meshes no rank knows them all,
so ranks tell one another. Then all of them have the same list, find the same mistakes, and raise the same error.

From top to bottom: trees of tensors and the names in them; what a rank may give (DTensors, plain tensors, pieces); the
`Description` of one rank, and `agreed`, which compares those of all; the same as JSON, for ranks of other jobs; and the
target placements of `redistribute(tree)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from ..distributed._mesh.text import of_ranks
from ..distributed.tensor._planner.regions import Box, NotPlanned, Regions
from ..distributed.tensor._runner.specs import read_cuts
from ._planner.memory import Memory, Part, Shared
from ._planner.sides import Ranks
from .checkpoint import Contents
from .tensor_files import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh

    from .meeting import Place
    from .tensor_files import Files

    Called = str | tuple[str, ...]
    Names = Callable[[str], Called] | Mapping[str, Called] | None  # from a path of the source to the target's
    Given: TypeAlias = "DTensor | Plain | Pieces"

    from ._planner.pieces import Pieced

    Data = dict[str, Any]  # of text, numbers, lists and dicts, as JSON has them
    from collections.abc import Callable


def leaves(tree: Any, is_leaf: Callable[[Any], bool] = lambda part: False) -> dict[str, Any]:
    """What a tree holds, by name: the keys and places on the way to it, joined by dots.

    Args:
        is_leaf: whether a part of it is to be taken as a whole.

    Raises:
        ValueError: two have one name.

    >>> leaves({"layers": [{"weight": 1}, {"weight": 2}], "step": 3})
    {'layers.0.weight': 1, 'layers.1.weight': 2, 'step': 3}
    """
    found: dict[str, Any] = {}
    for name, leaf in _walk(tree, "", is_leaf):
        if name in found:
            raise ValueError(
                f"Two tensors of the tree are called {name!r}: a key with a dot looks like a dict in a dict."
            )
        found[name] = leaf
    return found


def mapped(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """The same tree with other leaves: what `function` makes of each, given its name.

    >>> mapped(lambda name, leaf: f"{name}={leaf}", ({"a": 1}, [2]))
    ({'a': '0.a=1'}, ['1.0=2'])
    """
    if isinstance(tree, dict):
        made = {key: mapped(function, part, _below(path, key)) for key, part in tree.items()}
        return made if type(tree) is dict else _like(tree, made)
    if isinstance(tree, (list, tuple)):
        parts = [mapped(function, part, _below(path, number)) for number, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(path, tree)


def _like(tree: dict[Any, Any], made: dict[Any, Any]) -> Any:
    """A copy of `tree`, a dict of a subclass such as OrderedDict, with the values of `made` under the same keys. Keeps
    the class and what its `copy` keeps, as a defaultdict's factory."""
    found = tree.copy()
    for key, value in made.items():
        found[key] = value
    return found


def _walk(tree: Any, path: str, is_leaf: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    parts: Any
    if is_leaf(tree):
        parts = None
    elif isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, (list, tuple)):
        parts = enumerate(tree)
    else:
        parts = None
    if parts is None:
        yield path, tree
        return
    for key, part in parts:
        yield from _walk(part, _below(path, key), is_leaf)


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


DIGESTED = 1 << 16  # numbers at a time, which stay near
_ODD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


class Plain:
    """A plain tensor, with what a transfer asks of a DTensor: a replica on each rank that gives it."""

    device_mesh = _spec = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._local_tensor = tensor

    @property
    def place(self) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole, and which box of it this is."""
        shape = tuple(self._local_tensor.shape)
        return shape, Box((0,) * len(shape), shape)


class Piece(Plain):
    """A plain tensor that holds a box of a whole. See `torch_overlay.piece`."""

    def __init__(self, local: torch.Tensor, shape: Sequence[int], start: Sequence[int]) -> None:
        if not isinstance(local, torch.Tensor) or isinstance(local, DTensor):
            raise TypeError(f"piece() needs a plain tensor, what this rank holds; got a {type(local).__name__}.")
        self.shape, self.start, length = tuple(shape), tuple(start), tuple(local.shape)
        if not len(self.shape) == len(self.start) == len(length):
            raise ValueError(
                f"A piece, its whole and its start have as many dims; got a piece of shape {length}, a whole of shape "
                f"{self.shape} and the start {self.start}."
            )
        if any(not 0 <= at <= at + part <= whole for at, part, whole in zip(self.start, length, self.shape)):
            raise ValueError(
                f"A piece of shape {length} that starts at {self.start} isn't inside a whole of shape {self.shape}."
            )
        super().__init__(local)

    @property
    def place(self) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole, and which box of it this is."""
        return self.shape, Box(self.start, tuple(self._local_tensor.shape))

    def __repr__(self) -> str:
        return piece_text(*self.place)


def piece_text(shape: tuple[int, ...], box: Box) -> str:
    """A box of a whole of this shape, as a call that makes it."""
    return f"piece({box.length}, {shape}, {box.start})"


class Chunk(Piece):
    """A box of a tensor whose chunk list, as `torch.distributed.checkpoint` asks for it, says what this rank holds.

    Megatron-FSDP attaches one to the local tensors of its DTensors, whose rows it cuts where no placement does. The
    chunk list and the local tensor are asked for anew in each run, as a DTensor is for its local tensor.

    Args:
        owner: the DTensor, or the tensor that has the chunk list.
        name: as errors and the owner call it.
        number: of the chunk.
        shape: of the whole.
    """

    def __init__(self, owner: torch.Tensor, name: str, number: int, shape: Sequence[int]) -> None:
        self.owner, self._name, self._number = owner, name, number
        chunk = _chunks(owner)[number]
        self.start = tuple(chunk.offsets)
        local = self._local_tensor
        if tuple(local.shape) != tuple(chunk.sizes):
            raise ValueError(
                f"{name!r} has a chunk list, which says that a part of shape {tuple(chunk.sizes)} begins at "
                f"{self.start}, and the local tensor has shape {tuple(local.shape)}. Say with piece() what it holds."
            )
        self.shape = Piece(local, shape, self.start).shape

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        local = _chunked(self.owner)
        find = getattr(local, "__get_tensor_shard__", None)
        if find is None:
            return local
        from torch.distributed.checkpoint.metadata import MetadataIndex  # imports all of it, in 0.1 s

        found: torch.Tensor = find(MetadataIndex(self._name, self.start, self._number))
        return found

    @property
    def now(self) -> str | None:
        """Where it begins by the chunk list of now, in words; None if that is where it began."""
        chunks = _chunks(self.owner) if hasattr(_chunked(self.owner), "__create_chunk_list__") else []
        start = tuple(chunks[self._number].offsets) if self._number < len(chunks) else None
        if start is None:
            return f"is in no chunk list and was the one that begins at {self.start}"
        return None if start == self.start else f"is a chunk that begins at {start}, and that began at {self.start}"


def _chunked(tensor: torch.Tensor) -> torch.Tensor:
    """What has the chunk list: a DTensor's local tensor, since each DTensor has one itself, of its placements."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _chunks(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    found: list[ChunkStorageMetadata] = _chunked(tensor).__create_chunk_list__()  # type: ignore[attr-defined]
    return found


def _has_chunks(tensor: torch.Tensor) -> bool:
    """Whether it is read by its chunk list. One with a pending reduction isn't: its chunks hold terms, no values."""
    is_pending = isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements)
    return not is_pending and hasattr(_chunked(tensor), "__create_chunk_list__")


def _pieces_of_chunks(name: str, tensor: torch.Tensor) -> tuple[Chunk, ...]:
    """What a chunk list says of this rank.

    Raises:
        ValueError: it doesn't fit the local tensor, or doesn't say which whole it is of.
    """
    chunks = _chunks(tensor)
    if not chunks:
        return ()
    if isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
    else:
        items = tensor.__create_write_items__(name, tensor) if hasattr(tensor, "__create_write_items__") else []
        sizes = {tuple(item.tensor_data.size) for item in items if item.tensor_data is not None}
        if len(sizes) != 1:
            # Its own shape may be that of the part or of the whole.
            raise ValueError(
                f"{name!r} is no DTensor, and has a chunk list, and no write items that say the shape of the whole. "
                "Say with piece() what it holds."
            )
        (shape,) = sizes
    if len(chunks) > 1 and not hasattr(_chunked(tensor), "__get_tensor_shard__"):
        raise ValueError(
            f"{name!r} has a chunk list of {len(chunks)} chunks, and no __get_tensor_shard__ that gives them. Say with "
            "piece() what it holds."
        )
    return tuple([Chunk(tensor, name, number, shape) for number in range(len(chunks))])


class Pieces:
    """All pieces that a rank gives of one tensor."""

    device_mesh = _spec = None

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)


def own_tensors(tree: Any, side: str, names: Names = None) -> dict[str, Given]:
    """The tensors of one side, by name; one with several names stands there several times.

    Raises:
        TypeError: there is something else; None stands for a tensor that this rank has no part in.
        ValueError: two have one name.
    """
    found: dict[str, Given] = {}
    for path, leaf in leaves(tree, _are_pieces).items():
        if leaf is None:
            continue
        for name in names_for(path, names):
            if name in found:
                raise ValueError(f"Two tensors of the {side} are called {name!r}; names maps them to one name.")
            given = _given(name, leaf, side)
            if not isinstance(given, Pieces) or given.pieces:  # no chunks: nothing of it is here
                found[name] = given
    return found


def names_for(path: str, names: Any, may_skip: bool = False) -> Sequence[str]:
    """The names that a path has by `names=`: a function, a mapping of those that differ, or None.

    Args:
        may_skip: whether it may give None for a path, which has no name then.

    Raises:
        TypeError: it gives something else than names.
    """
    called = path if names is None else names(path) if callable(names) else names.get(path, path)
    if may_skip and called is None:
        return ()
    several = called if isinstance(called, (tuple, list)) else (called,)
    if not all(isinstance(name, str) for name in several):
        raise TypeError(f"names gives {called!r} for {path!r}; it gives a name, or a tuple of names.")
    return several


def _given(name: str, leaf: Any, side: str) -> Given:
    if isinstance(leaf, torch.Tensor) and _has_chunks(leaf):
        leaf = _pieces_of_chunks(name, leaf)
    if isinstance(leaf, torch.Tensor):
        problem = _immovable(leaf._local_tensor if isinstance(leaf, DTensor) else leaf)
        if problem is not None:
            raise TypeError(f"The {side} {name!r} {problem}.")
        return leaf if isinstance(leaf, DTensor) else Plain(leaf)
    if not isinstance(leaf, (Piece, tuple)):
        raise TypeError(_no_tensor(name, leaf, side))
    pieces = (leaf,) if isinstance(leaf, Piece) else leaf
    problems = filter(None, [_immovable(piece._local_tensor) for piece in pieces])
    for problem in problems:
        raise TypeError(f"A piece of the {side} {name!r} {problem}.")
    kinds = {(piece.shape, piece._local_tensor.dtype, piece._local_tensor.device.type) for piece in pieces}
    if len(kinds) > 1:
        said = ", and ".join(f"of a {str(dtype)[6:]} of shape {shape} on {device}" for shape, dtype, device in kinds)
        raise ValueError(f"The pieces of the {side} {name!r} belong to different tensors: {said}.")
    return Pieces(pieces)


def _no_tensor(name: str, leaf: Any, side: str) -> str:
    """What to say of something that is no tensor."""
    what = f"The {side} {name!r}" if name else f"The {side}"
    if isinstance(leaf, torch.nn.Module):
        return f"{what} is a module ({type(leaf).__name__}); a transfer takes tensors: give its state_dict()."
    if isinstance(leaf, Iterator):  # as named_parameters() gives it
        return f"{what} is a {type(leaf).__name__}; a transfer takes tensors by name: give dict(...) of its pairs."
    return f"{what} is a {type(leaf).__name__}; a transfer takes tensors."


def _immovable(local: torch.Tensor) -> str | None:
    """Why the values of a tensor aren't its elements in its own memory, in words; None if they are."""
    if local.is_quantized:  # its bytes viewed as whole numbers end the process
        return f"is quantised ({str(local.dtype)[6:]}), and its scales wouldn't travel: give int_repr() and the scales"
    if local.is_nested or local.layout is not torch.strided:
        how = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        return f"is {how}, and a transfer moves dense tensors: give the tensors that it holds, each with a name"
    is_wrapper = type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_wrapper and not isinstance(local, AsyncCollectiveTensor):
        kind = type(local).__name__
        return f"is a {kind}, and a transfer moves plain tensors: give those that it holds, each with a name"
    if local.is_meta:  # as FSDP2's before to_empty()
        return "is on meta and has no memory: materialise it first, as to_empty() does"
    return None


def _are_pieces(part: Any) -> bool:
    """A tuple of pieces is one tensor; an empty one is a part of the tree, as any other."""
    return isinstance(part, tuple) and bool(part) and all(isinstance(each, Piece) for each in part)


def settled(local: torch.Tensor) -> torch.Tensor:
    """A local tensor whose elements are there: what a collective still brings is waited for."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def part_of(name: str, box: Box, local: torch.Tensor) -> Part | None:
    """A box of a tensor in the memory of a local one; None if it is empty."""
    local = settled(local)
    if not local.numel():
        return None
    size = local.element_size()
    memory = Memory(local.data_ptr(), tuple(local.shape), tuple([size * stride for stride in local.stride()]), size)
    return Part(name, str(local.dtype), box, memory)


def digests_of(own: Given) -> list[tuple[Box, str]]:
    """Of what isn't a DTensor, each box with the digest of its values."""
    parts = own.pieces if isinstance(own, Pieces) else () if isinstance(own, DTensor) else (own,)
    return [(part.place[1], digest(part._local_tensor)) for part in parts]


def digest(tensor: torch.Tensor) -> str:
    """Of the bits of a tensor, the same on each device: a sum over eight bytes at a time, each mixed with its place."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # of one element strides may be any
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    places = torch.arange(1, min(whole // 8, DIGESTED) + 8, device=flat.device) * _ODD[0]
    found = []
    for some in (*flat[:whole].view(torch.int64).split(DIGESTED), flat[whole:].to(torch.int64)):
        # A sum of products alone takes a tensor and its negative for the same: the upper half comes down in between.
        mixed = (some ^ places[: len(some)]).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 32).mul_(_ODD[2])
        found.append(mixed.bitwise_xor_(mixed >> 29).sum())
    return hashlib.blake2b(repr([len(flat), *torch.stack(found).tolist()]).encode(), digest_size=16).hexdigest()


SIDES = "source", "target"
CASTS = frozenset({"float64", "float32", "float16", "bfloat16"})  # each to each
OPTIONS = "budget", "strict", "keep", "timeout", "changes", "relay", "host"  # of a Description
SHOWN = 5  # problems in one message


class Layout(NamedTuple):
    """How a tensor lies on a mesh.

    Attributes:
        dtype: its name.
        regions: which coordinate holds what.
        ranks: of the mesh, row-major; or those that have pieces.
        device: the type of device that the mesh is for.
        pieces: instead of a mesh, for each of these ranks the boxes that it has; a rank that says its own has no ranks.
    """

    dtype: str
    regions: Regions
    ranks: tuple[int, ...]
    device: str
    pieces: tuple[tuple[Box, ...], ...] = ()

    def __str__(self) -> str:
        shape, sizes = tuple(self.regions.shape), self.regions.sizes
        if self.pieces:
            return f"{self.dtype} of shape {shape}, in pieces,"
        if not self.ranks:
            return f"{self.dtype} of shape {shape}, a plain tensor,"
        return f"{self.dtype} of shape {shape}, {self.regions} on a mesh of sizes {sizes} over {of_ranks(self.ranks)}"


class Description(NamedTuple):
    """What a rank says.

    Attributes:
        source, target: its tensors, by name.
        problem: why it can't take part; None if it can.
        digests: of the values of plain sources and of pieces, by box.
        tied: names of its targets that are one block of memory.
        budget, strict, keep, timeout, changes, relay: as it gave them; None if it takes no part, or gave no timeout.
        host: where it says that it is; None if it doesn't.
        checkpoint: its source, as `Files.as_data` has it, if that is a checkpoint.
        unlisted: how many pieces it has, if it tells them to those who plan them and not to all.
    """

    source: dict[str, Layout]
    target: dict[str, Layout]
    problem: str | None = None
    digests: Mapping[str, Sequence[tuple[Box, str]]] | None = None
    tied: Sequence[tuple[str, ...]] = ()
    budget: int | None = None
    strict: bool | None = None
    keep: bool | None = None
    timeout: float | None = None
    changes: bool | str | None = None
    relay: bool | None = None
    host: str | None = None
    checkpoint: Data | None = None
    unlisted: int = 0


class Described(NamedTuple):
    """What a rank says of its two trees, and what it read in them.

    Attributes:
        error: because of which it has a problem, if reading them raised one.
        files: of the checkpoint that is its source.
    """

    description: Description
    sides: tuple[dict[str, Given], dict[str, Given]]
    error: Exception | None = None
    files: Files | None = None


class Tensor(NamedTuple):
    """One tensor of a transfer, as all ranks agree on it."""

    name: str
    source: Layout
    target: Layout

    @property
    def sides(self) -> tuple[Layout, Layout]:
        """Its source and its target."""
        return self.source, self.target

    @property
    def wire(self) -> torch.dtype:
        """The type in which it travels: of both sides' types the narrower one, the target's of two as wide."""
        types = getattr(torch, self.source.dtype), getattr(torch, self.target.dtype)
        return types[0] if types[0].itemsize < types[1].itemsize else types[1]

    @property
    def is_cast(self) -> bool:
        """Whether it changes its type."""
        return self.source.dtype != self.target.dtype


class Problem(NamedTuple):
    """What is wrong with a tensor. Those of the first stage that has some are raised, in this order.

    Attributes:
        stage: 0: a side by itself; 1: its two sides; 2: what its source leaves out.
        side: its number; the number of sides, of what replicas hold.
    """

    stage: int
    side: int
    name: str
    text: str


def describe(source: Any, target: Any, names: Names, place: Place | None = None, most: int | None = None) -> Described:
    """Both sides of a transfer on this rank. Any error becomes the rank's problem, so that all ranks hear of it at
    once: the others would wait in the store until the timeout for a rank that raised.

    Args:
        most: how many pieces it tells all ranks, at most. If it has more, it reads their values later, and only where
            another rank has the same box.
    """
    try:
        files = checkpoint = None
        if isinstance(source, Checkpoint):
            files, source = source.read(), None
            checkpoint = files.as_data(lambda path: names_for(path, names))
        sides = own_tensors(source, SIDES[0], names), own_tensors(target, SIDES[1])
        meshes = Meshes(place)
        layouts = [_layouts(side, meshes) for side in sides]
        wrong = [
            misfit(name, tensor, some[name].regions, meshes)
            for side, some in zip(sides, layouts)
            for name, tensor in side.items()
            if isinstance(tensor, DTensor)
        ]
        wrong += [
            f"the source {name!r} has a pending reduction ({layout.regions}): redistribute it on its mesh first"
            for name, layout in layouts[0].items()
            if layout.regions.pending
        ]
        problem = "; ".join(dict.fromkeys(filter(None, wrong)))
        if problem:
            return Described(Description(layouts[0], layouts[1], problem), sides)
        targets = [part for name, own in sides[1].items() for part in _parts(name, own, layouts[1][name], meshes)]
        shared = Shared.of({}, dict(enumerate(targets)))
        problem = "; ".join(shared_targets(shared))
        many = sum([len(own.pieces) for side in sides for own in side.values() if isinstance(own, Pieces)])
        unlisted = many if most is not None and many > most else 0
        read = (Plain,) if unlisted else (Plain, Pieces)
        digests = {name: digests_of(own) for name, own in sides[0].items() if isinstance(own, read)}
        said = Description(
            *(layouts[0], layouts[1], problem or None, digests, shared.tied), checkpoint=checkpoint, unlisted=unlisted
        )
        return Described(said, sides, files=files)
    except (TypeError, ValueError, RuntimeError, NotPlanned) as error:  # torch's own, of what has no values, too
        return Described(Description({}, {}, str(error)), ({}, {}), error)
    except Exception as error:  # as names= may raise any; the name of its class says more than its words
        return Described(Description({}, {}, f"{type(error).__name__}: {error}"), ({}, {}), error)


def _parts(name: str, own: Given, layout: Layout, meshes: Meshes) -> list[Part]:
    """Which boxes of a tensor lie where on this rank."""
    if isinstance(own, DTensor):
        here = meshes.see(own.device_mesh).here
        found = [] if here is None else [part_of(name, layout.regions.box(here), own._local_tensor)]
    else:
        pieces = own.pieces if isinstance(own, Pieces) else (own,)
        found = [part_of(name, piece.place[1], piece._local_tensor) for piece in pieces]
    return [part for part in found if part is not None]


def shared_targets(shared: Shared) -> list[str]:
    """That targets lie in the same memory, in words, for each two names."""
    return [
        f"the targets {first!r} and {second!r} share memory, and aren't one block: give each memory of its own, or one "
        "of them"
        if first != second
        else f"pieces of the target {first!r} share memory, and are different parts of it"
        for first, second in shared.clashes
    ]


def _layouts(tensors: Mapping[str, Given], meshes: Meshes) -> dict[str, Layout]:
    known: dict[Any, Layout] = {}
    return {
        name: layout_of(name, own, meshes) if isinstance(own, DTensor) else _of_plain(own, known)
        for name, own in tensors.items()
    }


def _of_plain(own: Plain | Pieces, known: dict[Any, Layout]) -> Layout:
    """Over no ranks: those who give it become known when all have said what they have. Tensors that lie alike, as many
    thousand experts do, have one object."""
    places = [each.place for each in (own.pieces if isinstance(own, Pieces) else (own,))]
    local = (own.pieces[0] if isinstance(own, Pieces) else own)._local_tensor
    boxes = tuple([box for _, box in places]) if isinstance(own, Pieces) else ()
    key = places[0][0], boxes, local.dtype, local.device.type
    if key not in known:
        layout = whole_layout(str(local.dtype).removeprefix("torch."), places[0][0], (), local.device.type)
        known[key] = layout._replace(pieces=(boxes,)) if boxes else layout
    return known[key]


def whole_layout(dtype: str, shape: tuple[int, ...], ranks: Sequence[int], device: str) -> Layout:
    """How a tensor lies that each of these ranks has as a whole; of no ranks, until all have said that they have it."""
    sizes = (len(ranks),) if ranks else ()
    regions = regions_on((Replicate(),) * len(sizes), None, shape, sizes)
    return Layout(dtype, regions, tuple(ranks), device)


class Seen(NamedTuple):
    """What is asked of a mesh for each of its tensors.

    Attributes:
        mesh: itself, so that no other one gets its id meanwhile.
        ranks: row-major.
        here: where this rank stands; None if it doesn't.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    here: tuple[int, ...] | None


class Meshes:
    """The meshes of one call, each looked at once; where worlds meet, with the ranks as that place numbers them."""

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        self._seen: dict[int, Seen] = {}
        self._ranks: dict[int, Ranks] = {}

    @property
    def rank(self) -> int:
        """This one, as errors call it."""
        return dist.get_rank() if self._place is None else self._place.rank

    def see(self, mesh: DeviceMesh) -> Seen:
        """What it is like."""
        found = self._seen.get(id(mesh))
        if found is None:
            here = mesh.get_coordinate()
            ranks = tuple(mesh.mesh.flatten().tolist())
            if self._place is not None:
                ranks = self._place.of_world(ranks)
            found = Seen(mesh, ranks, tuple(mesh.shape), here and tuple(here))
            self._seen[id(mesh)] = found
        return found

    def ranks(self, mesh: DeviceMesh) -> Ranks:
        """Its ranks, as planned with."""
        if id(mesh) not in self._ranks:
            seen = self.see(mesh)
            self._ranks[id(mesh)] = Ranks.of(seen.ranks, seen.sizes)
        return self._ranks[id(mesh)]


def misfit(name: str, tensor: DTensor, regions: Regions, meshes: Meshes) -> str | None:
    """What is wrong, in words, if this rank holds of a tensor what its placements don't say."""
    here, held = meshes.see(tensor.device_mesh).here, tensor._local_tensor.shape
    wanted = held if here is None else regions.box(here).length
    if wanted == held:
        return None
    return (
        f"{name!r} has shape {tuple(held)} on rank {meshes.rank}, where {tensor.placements} say {wanted}: say with "
        "piece() what it holds"
    )


def layout_of(name: str, tensor: DTensor, meshes: Meshes) -> Layout:
    """How a DTensor lies. Raises as `regions_of`."""
    mesh = tensor.device_mesh
    return Layout(
        str(tensor.dtype).removeprefix("torch."),
        regions_of(name, tensor, meshes),
        meshes.see(mesh).ranks,
        mesh.device_type,
    )


def regions_of(name: str, tensor: DTensor, meshes: Meshes) -> Regions:
    """Which coordinate holds what of a DTensor.

    Raises:
        NotPlanned: its shards are no boxes, or what is pending is no plain reduction.
    """
    spec = tensor._spec
    odd = [type(each).__name__ for each in spec.placements if each.is_partial() and type(each) is not Partial]
    if odd:  # its terms aren't brought together by its operation alone
        raise NotPlanned(f"{name!r} has a pending {odd[0]}. Redistribute it on its mesh first")
    sizes = meshes.see(tensor.device_mesh).sizes
    try:
        return regions_on(spec.placements, getattr(spec, "shard_order", None), tuple(tensor.shape), sizes)
    except NotPlanned as error:
        raise NotPlanned(f"{name!r} with placements {spec.placements}: {error}") from error


def regions_on(
    placements: tuple[Placement, ...], order: Any, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> Regions:
    """What placements say of a shape on a mesh of these sizes. Raises NotPlanned where shards are no boxes."""
    return _regions_on(placements, tuple(map(type, placements)), order, shape, sizes)


# By class, too: a subclass of Partial calls itself equal to it.
@lru_cache(maxsize=1024)
def _regions_on(
    placements: tuple[Placement, ...],
    kinds: tuple[type, ...],
    order: Any,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Regions:
    return read_cuts(placements, order, len(shape), sizes).on(shape, sizes)


def agreed(
    said: Mapping[int, Description], gone: frozenset[int] = frozenset(), strict: bool = True
) -> tuple[list[Tensor], dict[str, tuple[str, ...]]]:
    """The tensors of a transfer, from what all ranks say that aren't gone, in order of name; and, if it isn't strict,
    what only one side has.

    Raises:
        ValueError: something doesn't fit; names the tensors.
    """
    check_ranks(said)
    found: list[Problem] = []
    every = alike(said)
    sides = [one_side(every, side, found, gone) for side in SIDES]
    stop([problem.text for problem in found + unlike(every, found)])
    problems: list[str] = []
    contents = contents_of(said)
    if contents is not None:
        sides[0] = _of_checkpoint(contents, sides, said)
    both = sorted(sides[0].keys() & sides[1].keys())
    alone = {side: tuple(sorted(found.keys() - set(both))) for side, found in zip(SIDES, sides)}
    if not strict and not both:
        problems.append("they have no name in common")
    for name in both if not strict and both else sorted({*sides[0], *sides[1]}):
        problems += differences(name, *[side.get(name) for side in sides])
    stop(problems)
    return [Tensor(name, sides[0][name], sides[1][name]) for name in both], alone


def check_ranks(said: Mapping[int, Description]) -> None:
    """ValueError, on all ranks, if some rank can't take part, or they don't give the same options."""
    stop(by_sentence({rank: [each.problem] for rank, each in sorted(said.items()) if each.problem is not None}))
    _check_options(said)


def contents_of(said: Mapping[int, Description]) -> Contents | None:
    """The checkpoint that is the source; None if that are tensors. Raises ValueError if readers see different ones."""
    return Contents.of({rank: each.checkpoint for rank, each in said.items() if each.checkpoint is not None})


def _of_checkpoint(
    contents: Contents, sides: Sequence[Mapping[str, Layout]], said: Mapping[int, Description]
) -> dict[str, Layout]:
    """The layouts of a checkpoint's tensors: each reader can give any part, to the device of the target.

    Raises:
        ValueError: other ranks give tensors as the source.
    """
    if sides[0]:
        others = sorted(rank for rank, each in said.items() if each.source)
        raise ValueError(
            f"The source of a transfer is a checkpoint on {of_ranks(contents.ranks)}, and tensors on "
            f"{of_ranks(others)}: give the same kind, or None, on all ranks."
        )
    found = {}
    for name, number in contents.numbers.items():
        entry, target = contents.entries[number], sides[1].get(name)
        device = "cpu" if target is None else target.device
        found[name] = whole_layout(entry.dtype, entry.shape, contents.ranks, device)
    return found


def _check_options(said: Mapping[int, Description]) -> None:
    """ValueError, on all ranks, if they don't give the same `strict`, `keep`, `timeout`, `changes` and `relay`.

    Without it ranks with strict=True would stop at a name that only one side has, and the others wait for them.
    """
    for option in ("strict", "keep", "timeout", "changes", "relay"):
        by_value: dict[object, list[int]] = {}
        for rank, description in sorted(said.items()):
            by_value.setdefault(getattr(description, option), []).append(rank)
        if len(by_value) > 1:
            given = ", and ".join(f"{option}={value} on {of_ranks(ranks)}" for value, ranks in by_value.items())
            raise ValueError(f"All ranks of a Transfer give the same {option}=; got {given}.")


def alike(said: Mapping[int, Description]) -> list[tuple[Description, list[int]]]:
    """Each description with the ranks that said it: on a mesh all say the same, and it is looked at once."""
    found: dict[int, tuple[Description, list[int]]] = {}
    for rank, description in sorted(said.items()):
        found.setdefault(id(description), (description, []))[1].append(rank)
    return [*found.values()]


def unlike(alike: Sequence[tuple[Description, list[int]]], known: Sequence[Problem] = ()) -> list[Problem]:
    """Plain sources, or pieces with one place, that differ, but for tensors whose problems are known."""
    by_place: dict[tuple[str, Box], dict[str, list[int]]] = {}
    for description, ranks in alike:
        for name, found in (description.digests or {}).items():
            for box, seen in found:
                by_place.setdefault((name, box), {}).setdefault(seen, []).extend(ranks)
    problems, wrong = [], {problem.name for problem in known}
    for (name, box), values in sorted(by_place.items()):
        if len(values) == 1 or name in wrong:
            continue
        on = f"on {', another on '.join([of_ranks(sorted(ranks)) for ranks in values.values()])}"
        if any(description.source[name].pieces for description, _ in alike if name in description.source):
            at = f"has pieces of shape {box.length} that start at {box.start}"
            text = f"the source {name!r} {at}, with one value {on}"
        else:
            text = (
                f"the source {name!r} is a plain tensor, and so a replica, and has one value {on}: give shards as "
                "DTensors, or say with piece() what each one holds"
            )
        problems.append(Problem(0, len(SIDES), name, text))
    return problems


def untied(
    groups: Iterable[tuple[str, ...]], values: Mapping[int, Mapping[str, Sequence[tuple[Box, str]]]]
) -> list[str]:
    """Which targets can't be one block of memory, since their sources' values differ.

    Args:
        groups: names whose targets are one block on some rank.
        values: by rank, digests of what it has of their sources, by name.
    """
    by_name: dict[str, dict[Box, str]] = {}
    for said in values.values():
        for name, found in said.items():
            by_name.setdefault(name, {}).update(found)
    problems = []
    for names in groups:
        first, *others = names
        for other in others:
            one, two = by_name.get(first, {}), by_name.get(other, {})
            if one == two:
                continue
            why = "have different values"
            if one.keys() != two.keys():
                why = "are cut in different ways, so that nothing says that they are equal"
            problems.append(
                f"the targets {first!r} and {other!r} are one block of memory, as tied weights are, and their sources "
                f"{why}: leave one of them out"
            )
    return problems


def one_side(
    alike: Sequence[tuple[Description, list[int]]], side: str, problems: list[Problem], gone: frozenset[int]
) -> dict[str, Layout]:
    """The layouts of one side; every rank of a mesh must have the tensor, and all must say the same of it."""
    found: dict[str, dict[Layout, list[int]]] = {}
    for description, ranks in alike:
        for name, layout in getattr(description, side).items():
            found.setdefault(name, {}).setdefault(layout, []).extend(ranks)
    for name, by_layout in sorted(found.items()):
        _join_pieces(by_layout)
        if len(by_layout) == 1 and not (plain := next(iter(by_layout))).ranks:
            ranks = sorted(by_layout.pop(plain))
            by_layout[whole_layout(plain.dtype, tuple(plain.regions.shape), ranks, plain.device)] = ranks
        if len(by_layout) > 1:
            views: dict[str, list[int]] = {}
            for layout, ranks in by_layout.items():
                views.setdefault(str(layout), []).extend(ranks)
            said = ", and ".join(f"{view} on {of_ranks(sorted(ranks))}" for view, ranks in views.items())
            # As a parameter of FSDP2 x TP without TP. Nobody says that its values are equal on both: experts of one
            # name lie so, too, and differ.
            are_beside = len({layout._replace(ranks=()) for layout in by_layout}) == 1 and next(iter(by_layout)).ranks
            hint = "; if both are the same, give it on one mesh of all these ranks (DTensor.from_local)"
            text = f"the {side} {name!r} is {said}{hint if are_beside else ''}"
            problems.append(Problem(0, SIDES.index(side), name, text))
        known = {rank for ranks in by_layout.values() for rank in ranks}
        (layout, (rank, *_)), *_ = by_layout.items()
        missing = [other for other in layout.ranks if other not in known and other not in gone]
        if missing:
            lack = f"{of_ranks(missing)} {_do(missing)}n't have it"
            text = f"the {side} {name!r} of rank {rank} is {layout}, and {lack}"
            problems.append(Problem(0, SIDES.index(side), name, text))
    return {name: next(iter(by_layout)) for name, by_layout in found.items()}


def _join_pieces(by_layout: dict[Layout, list[int]]) -> None:
    """Pieces of one tensor, each rank with its own, are one layout."""
    kinds = {layout._replace(pieces=()) for layout in by_layout}
    if len(kinds) > 1 or not all(layout.pieces for layout in by_layout):
        return
    given = {rank: layout.pieces[0] for layout, ranks in by_layout.items() for rank in ranks}
    ranks = sorted(given)
    by_layout.clear()
    by_layout[kinds.pop()._replace(ranks=tuple(ranks), pieces=tuple([given[rank] for rank in ranks]))] = ranks


def by_sentence(problems: Mapping[int, Sequence[str]]) -> list[str]:
    """What ranks find wrong, each sentence once, after the ranks that say it."""
    ranks: dict[str, list[int]] = {}
    for rank, some in problems.items():
        for sentence in some:
            ranks.setdefault(sentence.removesuffix("."), []).append(rank)
    said: dict[tuple[int, ...], list[str]] = {}
    for sentence, who in ranks.items():
        said.setdefault(tuple(who), []).append(sentence)
    return [f"{of_ranks(who)}: {'; '.join(sentences)}" for who, sentences in said.items()]


def _do(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def lacking(name: str, sides: Sequence[str]) -> str:
    """That the first of these sides has a name alone."""
    has, lacks = sides
    return f"the {has} has {name!r}, and the {lacks} doesn't"


def differences(name: str, source: Layout | None, target: Layout | None) -> Iterable[str]:
    """Why the two sides of a tensor don't fit."""
    if source is None or target is None:
        return [lacking(name, SIDES if target is None else SIDES[::-1])]
    if source.regions.shape != target.regions.shape:
        return [f"{name!r} has shape {source.regions.shape} in the source and {target.regions.shape} in the target"]
    if source.dtype != target.dtype and not CASTS.issuperset((source.dtype, target.dtype)):
        return [
            f"{name!r} is {source.dtype} in the source and {target.dtype} in the target; only types among "
            f"{', '.join(sorted(CASTS))} are cast: convert it before"
        ]
    if source.device != target.device:
        return [f"{name!r} is on {source.device} in the source and on {target.device} in the target"]
    if target.regions.pending:
        return [f"the target {name!r} has a pending reduction ({target.regions}), which nothing can be written into"]
    return []


def stop(
    problems: Sequence[str], count: int = 0, why: str = "The source and the target of a transfer don't fit"
) -> None:
    """ValueError if something is wrong.

    Args:
        problems: the first few at least.
        count: how many there are, if these aren't all.
    """
    if problems:
        count = max(count, len(problems))
        more = f"; and {count - SHOWN} more" if count > SHOWN else ""
        raise ValueError(f"{why}: {'; '.join(problems[:SHOWN])}{more}.")


def torn(tensor: Tensor, pieces: Pieced) -> str | None:
    """What the pieces of a source leave out, in words."""
    missing = pieces.missing() if tensor.source.pieces else None
    if missing is None:
        return None
    return (
        f"the pieces of {tensor.name!r}, of shape {tuple(tensor.source.regions.shape)}, leave out what starts at "
        f"{missing.start} and has shape {missing.length}"
    )


TORN = "The source of a transfer isn't whole"


def as_data(description: Description) -> Data:
    """A description as values that JSON takes, for other ranks. `from_data` reads it back.

    Each mesh stands once in a list, and tensors refer to it by its place there. Tensors that lie alike, as 128 experts
    that differ in their names alone, share one row.
    """
    meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    sides = []
    for side in (description.source, description.target):
        names: dict[Layout, list[str]] = {}
        for name, layout in side.items():
            if not (layout.pieces and description.unlisted):
                names.setdefault(layout, []).append(name)
        rows: list[Any] = []
        for (dtype, regions, ranks, device, pieces), alike in names.items():
            mesh = meshes.setdefault((ranks, regions.sizes), len(meshes))
            rows.append([alike, dtype, device, mesh, regions.shape, regions.orders, regions.partial, pieces])
        sides.append(rows)
    # The boxes are those of the rows.
    digests = {name: [seen for _, seen in found] for name, found in (description.digests or {}).items()}
    said: Data = {"meshes": [*meshes], "problem": description.problem, "digests": digests, "tied": description.tied}
    said |= {"checkpoint": description.checkpoint, "unlisted": description.unlisted}
    said |= {name: getattr(description, name) for name in OPTIONS}
    return {**said, **dict(zip(SIDES, sides))}


def from_data(data: Data) -> Description:
    """The description that was said."""
    meshes = [(tuple(ranks), tuple(sizes)) for ranks, sizes in data["meshes"]]
    sides: list[dict[str, Layout]] = []
    for side in SIDES:
        sides.append({})
        for names, *row in data[side]:
            sides[-1].update(dict.fromkeys(names, _layout(row, meshes)))
    tied = [tuple(names) for names in data["tied"]]
    digests = {name: [*zip(_places(sides[0][name]), found)] for name, found in data["digests"].items()}
    options = {name: data[name] for name in OPTIONS}
    options |= {name: data[name] for name in ("checkpoint", "unlisted")}
    return Description(sides[0], sides[1], data["problem"], digests, tied, **options)


def _places(layout: Layout) -> Sequence[Box]:
    """The boxes that a rank has of what is no DTensor."""
    shape = tuple(layout.regions.shape)
    return layout.pieces[0] if layout.pieces else [Box((0,) * len(shape), shape)]


def boxed(digests: Data) -> dict[str, list[tuple[Box, str]]]:
    """Digests that were said, by box."""
    return {name: [(_box(box), seen) for box, seen in found] for name, found in digests.items()}


def all_from_data(said: Mapping[int, Data]) -> dict[int, Description]:
    """What ranks said; of those who said the same, one object."""
    made: dict[int, Description] = {}
    for data in said.values():
        if id(data) not in made:
            made[id(data)] = from_data(data)
    return {rank: made[id(data)] for rank, data in said.items()}


def _layout(row: list[Any], meshes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Layout:
    dtype, device, mesh, shape, orders, partial, pieces = row
    ranks, sizes = meshes[mesh]
    regions = Regions(tuple(shape), sizes, tuple(map(tuple, orders)), tuple(partial))
    return Layout(dtype, regions, ranks, device, tuple([tuple(map(_box, boxes)) for boxes in pieces]))


def _box(data: list[list[int]]) -> Box:
    return Box(tuple(data[0]), tuple(data[1]))


Placements = tuple[Placement, ...]


def target_placements(
    tensors: dict[str, DTensor], placements: Any, mesh: DeviceMesh | None
) -> dict[str, tuple[DeviceMesh, Placements]]:
    """For each tensor its mesh and its placements there.

    Args:
        placements: one for all axes, one for each axis, a function of a name and a tensor that gives one of these, or a
            tree of them like the tensors'.

    Raises:
        ValueError: a tensor has none, or another number of them than its mesh has axes.
        TypeError: something that is none of these.
    """
    rule = _rule(placements)
    found = {}
    for name, tensor in tensors.items():
        given, onto = rule(name, tensor), mesh if mesh is not None else tensor.device_mesh
        chosen = (given,) * onto.ndim if isinstance(given, Placement) else given
        if not _is_sequence(chosen):
            raise TypeError(f"placements for {name!r}: needed a placement or one for each axis, got {given!r}")
        if len(chosen) != onto.ndim:
            raise ValueError(f"placements for {name!r}: a mesh of {onto.ndim} axes needs as many, got {len(chosen)}")
        found[name] = onto, tuple([_counted_from_start(name, tensor, placement) for placement in chosen])
    return found


def _rule(placements: Any) -> Callable[[str, DTensor], Any]:
    if isinstance(placements, Placement) or _is_sequence(placements):
        return lambda name, tensor: placements
    if callable(placements):
        return placements  # type: ignore[no-any-return]
    tree = leaves(placements, lambda leaf: _is_sequence(leaf))

    def from_tree(name: str, tensor: DTensor) -> Any:
        if name not in tree:
            raise ValueError(f"placements: the tree has none for {name!r}")
        return tree[name]

    return from_tree


def _is_sequence(given: Any) -> bool:
    """Placements, one for each axis; of a mesh without axes, none."""
    return isinstance(given, Sequence) and all(isinstance(placement, Placement) for placement in given)


def _counted_from_start(name: str, tensor: DTensor, placement: Placement) -> Placement:
    if type(placement) is not Shard:
        return placement
    if not -tensor.ndim <= placement.dim < tensor.ndim:
        raise ValueError(f"placements for {name!r}: {placement} of a tensor with {tensor.ndim} dims")
    return placement if placement.dim >= 0 else Shard(placement.dim + tensor.ndim)
