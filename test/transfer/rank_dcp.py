"""Strided shards of which a rank holds several boxes, in checkpoints and full states. The twin: torch's local cut."""

import copy
import random
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_overlay
from mesh_ranks import make_root
from rank_layouts import GATHERED, KINDS, layout
from rank_loads import ROWS, chunks, sharded
from width import NIGHTLY

MESHES = ((2,), (4,), (6,), (2, 2), (2, 3), (3, 2))
FUSED = _StridedShard(0, split_factor=2)  # gate and up projections, as transformers lays them


def folder(rank):
    """A folder of the test, the same on all ranks."""
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name, 0)
    return name[0]


def remove(path, rank):
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)


def some_placements(rng, shape, sizes):
    """Random ones, at least one of them strided, which torch cuts."""
    while True:
        placements, order = layout(rng, shape, sizes)
        if order is None and {"SS", "FS"} & {kind for kind, *_ in placements} == {"SS"}:
            return [KINDS[kind](*rest) for kind, *rest in placements]


WHOLE = torch.arange(34).reshape(17, 2)
SHAPES = {"up": (12, 5), "down": (5, 8), "bias": (13,), "norm": (5,)}
LAID = {
    "up": [Shard(1), FUSED],
    "down": [_StridedShard(1, split_factor=2), Shard(0)],
    "bias": [Replicate(), FUSED],  # 7 and 6, of which the ranks have 4 + 3 and 3 + 3
    "norm": [Shard(0), Replicate()],
}
LAID_OTHERWISE = {**LAID, "up": [Replicate(), Shard(1)], "bias": [_StridedShard(0, split_factor=3), Replicate()]}


def fused_model(mesh, placements, scale=1.0):
    """Weights as packed tensor parallelism lays them, and an optimizer that has made a step. Without a mesh, plain."""
    torch.manual_seed(0)
    model = nn.Module()
    for name, shape in SHAPES.items():
        value = torch.randn(shape) * scale
        if mesh is not None:
            value = distribute_tensor(value, mesh, placements[name], src_data_rank=None)
        model.register_parameter(name, nn.Parameter(value))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam's first step takes seconds here
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return model, optimizer


def laid(cases, side, rank_holds=True):
    """The tensors of the cases on this side, as torch cuts them locally, or filled with -1. Those of meshes that don't
    have this rank are left out."""
    state = {}
    for number, (whole, *layouts) in enumerate(cases):
        mesh, placements = layouts[side]
        if mesh.get_coordinate() is not None:
            value = whole if rank_holds else torch.full_like(whole, -1)
            state[f"{number}"] = distribute_tensor(value, mesh, placements, src_data_rank=None)
    return state


class DcpCases:
    """Cases for ``EightRanks``."""

    def test_random_strided_shards_are_saved_and_loaded(self):
        """Each into the layout that was saved, into another one, and whole; and from plain shards into both."""
        seed = [random.randrange(1 << 30) if NIGHTLY else 80]
        dist.broadcast_object_list(seed, 0)
        rng, cases = random.Random(seed[0]), []
        meshes = [make_root(range(torch.Size(sizes).numel()), sizes, "ab"[: len(sizes)]) for sizes in MESHES]
        for _ in range(600 if NIGHTLY else 24):
            shape = [rng.randint(1, 13) for _ in range(rng.randint(1, 3))]
            one, two = rng.choices(meshes, k=2)
            layouts = [(mesh, some_placements(rng, shape, tuple(mesh.shape))) for mesh in (one, two)]
            layouts.append((one, [Shard(rng.randrange(len(shape))) for _ in range(one.ndim)]))
            cases.append((torch.arange(torch.Size(shape).numel()).reshape(shape), *layouts))
        paths = {source: folder(self.rank) for source in (0, 2)}
        for source, path in paths.items():
            dcp.save(laid(cases, source), checkpoint_id=path)
            for side in (0, 1):
                state = laid(cases, side, rank_holds=False)
                dcp.load(state, checkpoint_id=path)
                for key, expected in laid(cases, side).items():
                    said = f"seed {seed[0]}, case {key}: {cases[int(key)][1:]}, {source} into {side}"
                    self.assertTrue(torch.equal(state[key].to_local(), expected.to_local()), said)
            whole = {f"{number}": torch.full_like(case[0], -1) for number, case in enumerate(cases)}
            dcp.load(whole, checkpoint_id=path)
            for number, case in enumerate(cases):
                said = f"seed {seed[0]}, case {number}: {case[1:]}, {source} whole"
                self.assertTrue(torch.equal(whole[f"{number}"], case[0]), said)
            remove(path, self.rank)

    def test_a_model_and_its_optimizer_go_through_a_checkpoint(self):
        """As shards, into another layout."""
        mesh, other = make_root(range(8), (4, 2), ("dp", "tp")), make_root(range(8), (2, 4), ("dp", "tp"))
        model, optimizer = fused_model(mesh, LAID)
        path = folder(self.rank)
        dcp.save(dict(zip(("model", "optim"), states.get_state_dict(model, optimizer))), checkpoint_id=path)
        again, stepped = fused_model(other, LAID_OTHERWISE, scale=-1.0)
        state = dict(zip(("model", "optim"), states.get_state_dict(again, stepped)))
        dcp.load(state, checkpoint_id=path)
        states.set_state_dict(again, stepped, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self._check_model(again, stepped, other, LAID_OTHERWISE)
        remove(path, self.rank)

    def test_full_states_come_out_and_go_in(self):
        """From all ranks, and from rank 0 alone."""
        mesh = make_root(range(8), (4, 2), ("dp", "tp"))
        model, optimizer = fused_model(mesh, LAID)
        alone, stepped = fused_model(None, None)
        expected = states.get_state_dict(alone, stepped)
        if GATHERED:
            whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
            given = states.get_state_dict(model, optimizer, options=whole)
            if self.rank == 0:
                self.assertEqual(given[0], expected[0])
                self.assertEqual(given[1]["state"], expected[1]["state"])
        for from_rank_0 in (False, True):
            again, stepped = fused_model(mesh, LAID, scale=-1.0)
            options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
            weights, optim = ({}, {}) if from_rank_0 and self.rank else copy.deepcopy(expected)  # torch changes them
            states.set_model_state_dict(again, weights, options=options)
            states.set_optimizer_state_dict(again, stepped, optim, options=options)
            self._check_model(again, stepped, mesh, LAID)

    def test_uneven_shards_of_fsdp2_x_tp_are_saved_and_loaded(self):
        """Of some lengths torch reads other shards from the placements than FSDP2 makes, and on stock no load works."""
        mesh = make_root(range(8), (4, 2), ("dp", "tp"))
        path, plain = folder(self.rank), folder(self.rank)
        torch.manual_seed(0)
        state = {f"{n}.weight": torch.randn(rows, 3) for n, rows in enumerate(ROWS)}
        state |= {f"{n}.bias": torch.randn(rows) for n, rows in enumerate(ROWS)}
        model = sharded(mesh, "cpu")
        dcp.save(state, checkpoint_id=plain)
        dcp.load(dict(model.named_parameters()), checkpoint_id=plain)
        for name, parameter in model.named_parameters():
            self.assertTrue(torch.equal(parameter.to_local(), chunks(state[name], mesh, "tp", "dp")), name)
        dcp.save(dict(model.named_parameters()), checkpoint_id=path)
        whole = {name: torch.full_like(value, -1) for name, value in state.items()}
        dcp.load(whole, checkpoint_id=path)
        self.assertEqual(whole, state)
        remove(path, self.rank)
        remove(plain, self.rank)

    def test_status_says_that_torch_redistributes_them(self):
        if GATHERED:
            held = distribute_tensor(WHOLE, make_root(range(8), (8,), ("tp",)), [FUSED], src_data_rank=None)
            before = self._left_to_torch()
            self.assertTrue(torch.equal(held.full_tensor(), WHOLE))
            self.assertEqual(self._left_to_torch(), before + 1)

    def _left_to_torch(self):
        """How many redistributions of strided shards like these, as `status()` counts them."""
        reasons = dict(torch_overlay.status().counts)["redistributions by torch's own code"]
        return sum(count for reason, count in reasons.items() if "has a split factor of" in reason)

    def _check_model(self, model, optimizer, mesh, placements):
        """Against the model of plain tensors, cut by torch."""
        alone, stepped = fused_model(None, None)
        for name, parameter in model.named_parameters():
            twin = alone.get_parameter(name)
            momenta = (optimizer.state[parameter]["momentum_buffer"], stepped.state[twin]["momentum_buffer"])
            for ours, whole in ((parameter.detach(), twin.detach()), momenta):
                cut = distribute_tensor(whole, mesh, placements[name], src_data_rank=None)
                self.assertEqual(ours.placements, cut.placements)
                self.assertTrue(torch.equal(ours.to_local(), cut.to_local()), name)
