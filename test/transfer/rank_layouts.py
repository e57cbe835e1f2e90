"""Random tensors with every shard that torch can make, through `Transfer` and full states.

The twin cuts whole tensors by hand, and is held against torch's own local cut where torch can make it.
"""

import math
import random

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import DEVICE
from torch_overlay import versions
from twins_tensor import rows
from width import NIGHTLY

SIZES = ((2,), (4,), (6,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GATHERED = versions.running().number >= (2, 12)  # before, torch redistributes no strided shard without a shard order
OVER_STRIDED = versions.running().number >= (2, 12)
KINDS = {
    "R": Replicate,
    "S": Shard,
    "SS": lambda dim, factor: _StridedShard(dim, split_factor=factor),
    "FS": lambda dim, factor: _StridedShard(dim, split_factor=factor),
}


def product(axes, sizes):
    return math.prod(sizes[axis] for axis in axes)


def layout(rng, shape, sizes):
    """Random placements for a tensor, as pairs for `rows`, and the order of axes in which they cut, or None. Strided
    shards are those of torch ("SS") or those of FSDP2 over tensor parallelism ("FS")."""
    while True:
        drawn = [(rng.choice(("R", "S", "S", "SS", "SS")), rng.randrange(len(shape)), rng.randint(2, 4)) for _ in sizes]
        placements = [tuple(each[: ("R", "S", "SS").index(each[0]) + 1]) for each in drawn]
        is_legal = True
        for dim, length in enumerate(shape):
            axes = [axis for axis, each in enumerate(placements) if each[0] != "R" and each[1] == dim]
            if not axes:
                continue
            first, *others = axes
            inner = product(others, sizes)
            strided = [axis for axis in axes if placements[axis][0] == "SS"]
            if strided == [first] and others and (rng.random() < 0.5 or placements[first][2] == inner):
                placements[first] = ("FS", dim, inner)
            elif any(placements[axis][2] == product([a for a in axes if a > axis], sizes) for axis in strided):
                # Over a strided shard it may be FSDP's or torch's. Over plain ones both are the same if it is even.
                is_legal &= len(strided) == 1 and length % product(axes, sizes) == 0
            # Before 2.12 FSDP2's own shard over a strided one is a plain one: two strided ones and a plain one on a dim
            # may mean either, and are refused.
            is_legal &= OVER_STRIDED or len(axes) == 1 or (placements[axes[-1]][0] != "SS" and len(strided) < 2)
        if is_legal:
            break
    order = None
    if not {"SS", "FS"} & {each[0] for each in placements} and rng.random() < 0.5:
        order = rng.sample(range(len(sizes)), len(sizes))
    return placements, order


def local_part(whole, mesh, placements, order):
    """What this rank holds; None outside of the mesh."""
    if mesh.get_coordinate() is None:
        return None
    for dim, indices in enumerate(rows(placements, whole.shape, tuple(mesh.shape), mesh.get_coordinate(), order)):
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return whole.clone()


def made(whole, mesh, placements, order):
    """A DTensor that holds a part of a whole tensor so."""
    given = tuple(KINDS[kind](*rest) for kind, *rest in placements)
    local = local_part(whole, mesh, placements, order)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, given, tensor_meta=meta)
    if order is not None:
        by_dim = {}
        for axis in order:
            if placements[axis][0] == "S":
                by_dim.setdefault(placements[axis][1], []).append(axis)
        spec.shard_order = tuple(ShardOrderEntry(dim, tuple(axes)) for dim, axes in sorted(by_dim.items()))
    return DTensor(whole.new_empty(0) if local is None else local, spec, requires_grad=False)


def some_shape(rng):
    return tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))


class LayoutCases:
    """Cases for ``EightRanks``."""

    def side(self, rng, wholes):
        """One side of a transfer: tensors on a mesh of some ranks, a few of them plain, and what this rank holds."""
        sizes = rng.choice(SIZES)
        ranks = rng.sample(range(WORLD), math.prod(sizes))
        mesh = DeviceMesh(DEVICE, torch.tensor(ranks).reshape(sizes), _init_backend=False)
        tensors, twins = {}, {}
        for name, whole in wholes.items():
            drawn, plain = layout(rng, whole.shape, sizes), rng.random() < 0.1
            cast = whole.to(rng.choice(DTYPES))
            if self.rank not in ranks:
                continue
            tensors[name] = cast.clone() if plain else made(cast, mesh, *drawn)
            twins[name] = cast if plain else local_part(cast, mesh, *drawn)
            if not plain and drawn[1] is None and "FS" not in {each[0] for each in drawn[0]}:
                cut = distribute_tensor(cast, mesh, tensors[name].placements, src_data_rank=None)
                self.assertTrue(torch.equal(cut.to_local(), twins[name]), f"the twin: {drawn}")
        return tensors, twins

    def check_random_layouts(self, seeds, count):
        """From any layout to any other one, with casts and one option; a second run after changes."""
        for seed in seeds:
            rng = random.Random(f"layouts {seed}")
            wholes = {
                f"{n}": torch.arange(math.prod(shape := some_shape(rng))).reshape(shape) % 251 for n in range(count)
            }
            # The same numbers are drawn again for the second run, from other values.
            state = rng.getstate()
            source, _ = self.side(rng, wholes)
            between = rng.getstate()
            target, wanted = self.side(rng, wholes)
            only = sorted(rng.sample(sorted(wholes), count // 2)) if seed % 3 == 0 else None
            options = {"budget": rng.choice((1 << 20, 4000)), "keep": seed % 2 == 0}
            options |= rng.choice(({}, {"changes": True}, {"relay": True}, {"relay": False}))
            for tensor in target.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
            with torch_overlay.Transfer(source or None, target or None, **options) as transfer:
                transfer.run()
                self.compare(target, wanted, f"seed {seed}, {options}")
                wholes = {name: whole.where(whole % 7 > 0, 250 - whole) for name, whole in wholes.items()}
                rng.setstate(state)
                _, values = self.side(rng, wholes)
                rng.setstate(between)
                _, changed = self.side(rng, wholes)
                for name, tensor in source.items():
                    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(values[name])
                transfer.run(**({} if only is None else {"only": only}))
                wanted = {name: (changed if only is None or name in only else wanted)[name] for name in wanted}
                self.compare(target, wanted, f"seed {seed}, {options}, second run, only {only}")

    def compare(self, target, wanted, said):
        for name, tensor in target.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            layout = getattr(tensor, "placements", "plain")
            self.assertTrue(torch.equal(local, wanted[name]), f"{said}: {name} of {tuple(tensor.shape)}, {layout}")

    def test_a_packed_dim_beside_uneven_fsdp2(self):
        """9 rows on (2, 2) as FSDP2 x TP has them, of which torch reads other rows, and packed columns."""
        mesh = make_root(range(WORLD), (2, 2, 2), ("dp", "tp", "etp"))
        whole, drawn = torch.arange(9.0 * 6).reshape(9, 6), ([("FS", 0, 2), ("S", 0), ("SS", 1, 2)], None)
        model, got, again = nn.Module(), torch.zeros(9, 6), made(-whole, mesh, *drawn)
        model.weight = nn.Parameter(made(whole, mesh, *drawn), requires_grad=False)
        for source, target in (({"w": model.weight}, {"w": got}), ({"w": got}, {"w": again})):
            with torch_overlay.Transfer(source, target) as transfer:
                transfer.run()
        self.assertTrue(torch.equal(got, whole) and torch.equal(again.to_local(), model.weight.to_local()))
        options = states.StateDictOptions(full_state_dict=True)
        self.assertTrue(torch.equal(states.get_model_state_dict(model, options=options)["weight"], whole))
        with self.assertRaisesRegex(ValueError, "don't tell which rows a rank holds"):
            again.__create_chunk_list__()

    def check_random_full_states(self, seeds, count):
        """Full states of a model with such parameters, out and in, and torch's full_tensor()."""
        meshes = {sizes: make_root(range(math.prod(sizes)), sizes, "abc"[: len(sizes)]) for sizes in SIZES}
        for seed in seeds:
            rng = random.Random(f"states {seed}")
            mesh = meshes[rng.choice(SIZES)]
            model, wholes, drawn = nn.Module(), {}, {}
            for n in range(count):
                shape = some_shape(rng)
                wholes[f"p{n}"] = torch.arange(float(math.prod(shape))).reshape(shape)
                layouts = iter(lambda: layout(rng, shape, tuple(mesh.shape)), None)  # noqa: B023
                drawn[f"p{n}"] = next(each for each in layouts if each[1] is None)  # detach() forgets an order
            if mesh.get_coordinate() is None:
                continue
            for name, whole in wholes.items():
                model.register_parameter(name, nn.Parameter(made(whole, mesh, *drawn[name]), requires_grad=False))
            full = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
            for name, whole in wholes.items():
                self.assertTrue(torch.equal(full[name], whole), f"seed {seed}: {drawn[name]} of {tuple(whole.shape)}")
            for from_rank_0 in (False, True):
                for parameter in model.parameters():
                    parameter.to_local().fill_(-1)
                given = {} if from_rank_0 and self.rank else {name: whole.clone() for name, whole in wholes.items()}
                if from_rank_0 and mesh.size() < WORLD:
                    continue  # it broadcasts over the whole world
                options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
                states.set_model_state_dict(model, given, options=options)
                for name, whole in wholes.items():
                    local = model.get_parameter(name).to_local()
                    want = local_part(whole, mesh, *drawn[name])
                    self.assertTrue(torch.equal(local, want), f"seed {seed}, {from_rank_0}: {drawn[name]}")


# Three thousand tensors at night, in parts that each stay within a test's time limit.
for first in range(0, 150, 15) if NIGHTLY else (0,):

    def check(self, seeds=range(first, first + (15 if NIGHTLY else 4))):
        self.check_random_layouts(seeds, count=20 if NIGHTLY else 8)

    def check_states(self, seeds=range(first, first + (15 if NIGHTLY else 2))):
        if GATHERED:
            self.check_random_full_states(seeds, count=20 if NIGHTLY else 8)

    setattr(LayoutCases, f"test_random_layouts_{first:03}", check)
    setattr(LayoutCases, f"test_random_full_states_{first:03}", check_states)
