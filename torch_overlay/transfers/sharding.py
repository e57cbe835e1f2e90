"""`Sharding`: which rank holds which box of a tensor, as a value that ranks compare. Read from DTensors and pieces."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..distributed._mesh.state import group_names
from ..distributed._mesh.text import of_ranks
from ..distributed.tensor._planner.regions import NotPlanned, Regions
from ..distributed.tensor._runner.at_hand import wrong_order
from ..distributed.tensor._runner.specs import read_cuts
from ..overlay import is_enabled
from ._planner.sides import Ranks
from .pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from ..distributed.tensor._planner.boxes import Box
    from ..rendezvous.place import Place
    from .pieces import Given, Plain

CASTS = frozenset({"float64", "float32", "float16", "bfloat16"})  # each is cast to each; other types must be equal


class Sharding(NamedTuple):
    """How a tensor lies on one side of a transfer: on a mesh, in pieces, or whole on some ranks.

    Attributes:
        dtype: its name, as "bfloat16".
        regions: which coordinate of the mesh holds which box. For pieces and plain tensors, only the shape counts.
        ranks: those of the mesh, row-major; or those that have pieces, or the whole. A rank that describes its own
            pieces or its plain tensor gives none: it doesn't know which other ranks have some.
        device: the device type.
        pieces: for each of `ranks` the boxes that it has; one entry if there are no ranks. Empty for a mesh.
        meshes: on how many disjoint meshes the whole tensor lies. If there are several, the first axis of `regions`
            counts them.
    """

    dtype: str
    regions: Regions
    ranks: tuple[int, ...]
    device: str
    pieces: tuple[tuple[Box, ...], ...] = ()
    meshes: int = 1

    def __str__(self) -> str:
        shape, sizes = tuple(self.regions.shape), self.regions.sizes
        if self.pieces:
            return f"{self.dtype} of shape {shape}, in pieces,"
        if not self.ranks:
            return f"{self.dtype} of shape {shape}, a plain tensor,"
        return f"{self.dtype} of shape {shape}, {self.regions} on a mesh of sizes {sizes} over {of_ranks(self.ranks)}"


def shardings(tensors: Mapping[str, Given], meshes: Meshes) -> dict[str, Sharding]:
    """Return the sharding of each tensor that this rank gives, by name."""
    known: dict[Any, Sharding] = {}
    return {
        name: sharding_of(name, given, meshes) if isinstance(given, DTensor) else _sharding_without_mesh(given, known)
        for name, given in tensors.items()
    }


def _sharding_without_mesh(given: Plain | Pieces, known: dict[Any, Sharding]) -> Sharding:
    """Return the sharding of a plain tensor or of pieces, without ranks until all have said what they have."""
    shapes_and_boxes = [piece.shape_and_box for piece in (given.pieces if isinstance(given, Pieces) else (given,))]
    local = (given.pieces[0] if isinstance(given, Pieces) else given)._local_tensor
    shape = shapes_and_boxes[0][0]
    boxes = tuple([box for _, box in shapes_and_boxes]) if isinstance(given, Pieces) else ()
    key = shape, boxes, local.dtype, local.device.type
    if key not in known:
        sharding = replicated_sharding(str(local.dtype).removeprefix("torch."), shape, (), local.device.type)
        known[key] = sharding._replace(pieces=(boxes,)) if boxes else sharding
    return known[key]


def replicated_sharding(dtype: str, shape: tuple[int, ...], ranks: Sequence[int], device: str) -> Sharding:
    """Return the sharding of a tensor of which each of `ranks` has all. No ranks: it isn't known yet who has it."""
    sizes = (len(ranks),) if ranks else ()
    regions = regions_on((Replicate(),) * len(sizes), None, shape, sizes)
    return Sharding(dtype, regions, tuple(ranks), device)


def on_several_meshes(shardings: Iterable[Sharding]) -> Sharding | None:
    """Join the shardings of one tensor that lies alike on several disjoint meshes, as replicas of one another.

    FSDP2 x TP makes such tensors: a norm's weight, which TP leaves alone, is sharded by FSDP on one mesh for each TP
    rank. Nothing here says that the values are equal on all meshes: experts of one name look the same, and differ.
    """
    meshes = sorted(shardings, key=lambda sharding: sharding.ranks)
    first = meshes[0]
    ranks = [rank for sharding in meshes for rank in sharding.ranks]
    is_alike = all(sharding._replace(ranks=()) == first._replace(ranks=()) for sharding in meshes)
    if not first.ranks or first.pieces or not is_alike or len(ranks) > len({*ranks}):
        return None
    shape, sizes, orders, partial = first.regions
    inner = tuple([tuple([axis + 1 for axis in axes]) for axes in orders])
    regions = Regions(shape, (len(meshes), *sizes), inner, (None, *partial))
    return first._replace(regions=regions, ranks=tuple(ranks), meshes=len(meshes))


class MeshView(NamedTuple):
    """What a transfer needs of a mesh, read once for all of its tensors.

    Attributes:
        mesh: the mesh itself. Held so that its id isn't given to another mesh while it is a key.
        ranks: row-major, numbered as the place does where worlds met.
        sizes: for each axis.
        coordinate: of this rank; None if the mesh doesn't have it.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None


class Meshes:
    """The meshes that one call meets. Each is read once, since reading its ranks copies a tensor.

    Args:
        place: where several worlds met; ranks are then numbered as there.
    """

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        self._views: dict[int, MeshView] = {}
        self._ranks: dict[int, Ranks] = {}

    @property
    def rank(self) -> int:
        """This rank, as errors number it."""
        return dist.get_rank() if self._place is None else self._place.rank

    def view(self, mesh: DeviceMesh) -> MeshView:
        """Return what a transfer needs of this mesh."""
        # By id, since comparing two meshes may compare all of their ranks.
        view = self._views.get(id(mesh))
        if view is None:
            coordinate = mesh.get_coordinate()
            # Who made the tensor may have cut it in either order. Without the overlay all is read by coordinates.
            is_asked = is_enabled() and coordinate is not None and group_names(mesh)
            wrong = wrong_order(mesh) if is_asked else None
            if wrong is not None:
                raise RuntimeError(wrong)
            ranks = tuple(mesh.mesh.flatten().tolist())
            if self._place is not None:
                ranks = self._place.of_world(ranks)
            view = MeshView(mesh, ranks, tuple(mesh.shape), coordinate and tuple(coordinate))
            self._views[id(mesh)] = view
        return view

    def ranks(self, mesh: DeviceMesh) -> Ranks:
        """Return the ranks of this mesh, in the form that the planner takes."""
        if id(mesh) not in self._ranks:
            view = self.view(mesh)
            self._ranks[id(mesh)] = Ranks.of(view.ranks, view.sizes)
        return self._ranks[id(mesh)]


def misfit(name: str, tensor: DTensor, regions: Regions, meshes: Meshes) -> str | None:
    """Say how a DTensor's local tensor differs in shape from what its placements give this rank; None if it doesn't, or
    if this rank isn't in the mesh.

    `from_local` can make such DTensors, since it compares nothing. An exchange would ask for elements beyond them.
    """
    coordinate, held = meshes.view(tensor.device_mesh).coordinate, tensor._local_tensor.shape
    needed = held if coordinate is None else regions.box(coordinate).length
    if needed == held:
        return None
    return (
        f"{name!r} has shape {tuple(held)} on rank {meshes.rank}, where {tensor.placements} say {needed}: say with "
        "piece() what it holds"
    )


def sharding_of(name: str, tensor: DTensor, meshes: Meshes) -> Sharding:
    """Return the sharding of a DTensor. The name is for errors."""
    mesh = tensor.device_mesh
    return Sharding(
        str(tensor.dtype).removeprefix("torch."),
        regions_of(name, tensor, meshes),
        meshes.view(mesh).ranks,
        mesh.device_type,
    )


def regions_of(name: str, tensor: DTensor, meshes: Meshes) -> Regions:
    """Return which coordinate of its mesh holds which box of a DTensor. The name is for errors."""
    spec = tensor._spec
    # A subclass of Partial (torch's _MaskPartial, say) reduces by more than its op: adding up its terms is wrong.
    others = [type(each).__name__ for each in spec.placements if each.is_partial() and type(each) is not Partial]
    if others:
        raise NotPlanned(f"{name!r} has a pending {others[0]}. Redistribute it on its mesh first")
    sizes = meshes.view(tensor.device_mesh).sizes
    try:
        shape, order = tuple(tensor.shape), getattr(spec, "shard_order", None)
        return regions_on(spec.placements, order, shape, sizes, is_compared=True)
    except NotPlanned as error:
        way_out = "give piece() of the local tensor for each box that a rank holds"
        raise NotPlanned(f"{name!r} with placements {spec.placements}: {error}; {way_out}") from error


def regions_on(
    placements: tuple[Placement, ...],
    order: Any,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    is_compared: bool = False,
) -> Regions:
    """Return which coordinate holds which box of a tensor.

    FSDP2 x TP of 9 rows on (4, 2) cuts a chunk of a chunk, where torch reads something else from the placements
    (strided.py). So shards in an order of their own that don't divide evenly are refused, unless the caller compares
    what is returned with the local tensor that is there (`is_compared`): if all local shapes are those of chunks of
    chunks, all boxes are.
    """
    return _regions_on(placements, tuple(map(type, placements)), order, shape, sizes, is_compared)


# The classes of the placements are a part of the key: a subclass of Partial compares equal to it.
@lru_cache(maxsize=1024)
def _regions_on(
    placements: tuple[Placement, ...],
    kinds: tuple[type, ...],
    order: Any,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    is_compared: bool,
) -> Regions:
    """Do what `regions_on` does. Cached by value, since a model has many tensors and few shardings."""
    cuts = read_cuts(placements, order, len(shape), sizes)
    return Regions(shape, sizes, cuts.orders, cuts.partial) if is_compared else cuts.on(shape, sizes)
