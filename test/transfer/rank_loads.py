"""Full states loaded into shards that FSDP2 cut after tensor parallelism did, lengths that the ranks don't divide."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torch_overlay
from mesh_ranks import WORLD, make_root
from torch_overlay import versions

ROWS = (16, 10, 5, 2, 17, 9)  # of the last two, torch reads other shards from the placements than FSDP2 makes


def chunks(whole, mesh, *axes):
    """What a rank holds of rows that are chunked along these axes, outer first."""
    for axis in axes:
        parts, place = torch.chunk(whole, mesh[axis].size()), mesh.get_local_rank(axis)
        whole = parts[place] if place < len(parts) else whole[:0]
    return whole


def sharded(mesh, device):
    """FSDP2 x TP; without a device, on meta."""
    with torch.device(device):
        model = nn.Sequential(*[nn.Linear(3, rows) for rows in ROWS])
    for layer in model:
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
    return fully_shard(model, mesh=mesh["dp"])


class LoadCases:
    """Cases for ``EightRanks``."""

    def test_full_states_load_into_uneven_shards(self):
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        torch.manual_seed(0)
        state = {f"{n}.weight": torch.randn(rows, 3) for n, rows in enumerate(ROWS)}
        state |= {f"{n}.bias": torch.randn(rows) for n, rows in enumerate(ROWS)}
        for device, rank0 in (("cpu", False), ("cpu", True), ("meta", True)):
            model = sharded(mesh, device)
            given = {} if rank0 and self.rank else {name: whole.clone() for name, whole in state.items()}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank0)
            set_model_state_dict(model, given, options=options)
            for name, parameter in model.named_parameters():
                self.assertIsInstance(parameter, DTensor)
                want = chunks(state[name], mesh, "tp", "dp")
                self.assertTrue(torch.equal(parameter.to_local(), want), f"{name} {device} {rank0}")

    def test_uneven_shards_of_fsdp2_x_tp_move_both_ways(self):
        """Against the whole tensors, and torch's full_tensor()."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        torch.manual_seed(1)
        model = dict(sharded(mesh, "cpu").named_parameters())
        state = {name: torch.randn(parameter.shape) for name, parameter in model.items()}
        with torch_overlay.Transfer(state, model) as sync:
            sync.run()
        got = {name: torch.zeros(parameter.shape) for name, parameter in model.items()}
        with torch_overlay.Transfer(model, got) as sync:
            sync.run()
        for name, parameter in model.items():
            self.assertTrue(torch.equal(parameter.to_local(), chunks(state[name], mesh, "tp", "dp")), name)
            self.assertTrue(torch.equal(parameter.full_tensor(), state[name]), name)
            self.assertTrue(torch.equal(got[name], state[name]), name)

    def test_fused_projections_move_both_ways(self):
        """As transformers lays gate and up: a lone strided shard, beside a shard of another dim and replicas."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        fused, whole = _StridedShard(0, split_factor=2), torch.arange(42.0).reshape(14, 3)
        for placements in ([Shard(1), fused], [Replicate(), fused], [fused, Replicate()]):
            source = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            if versions.running().number >= (2, 12):  # up to 2.11 torch refuses a lone strided shard
                self.assertTrue(torch.equal(source.full_tensor(), whole))
            target, got = torch.zeros_like(source), torch.zeros(14, 3)
            with torch_overlay.Transfer([source], [got]) as sync:
                sync.run()
                self.assertIn("1 tensor, 168 B, on ranks 0-7\noverlay: 1 exchange", str(torch_overlay.explain(sync)))
            with torch_overlay.Transfer([got], [target]) as sync:
                sync.run()
                self.assertTrue(torch.equal(got, whole) and torch.equal(target.to_local(), source.to_local()))
                target._spec = distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None)._spec
                with self.assertRaisesRegex(ValueError, "is none of the parts that it lists and was a part of shape"):
                    sync.run()
        local = torch.zeros(6 - self.rank // 7, 3)
        odd = DTensor.from_local(local, mesh, [Replicate(), fused], run_check=False, shape=(12, 3), stride=(3, 1))
        with self.assertRaisesRegex(ValueError, "rank 7: .* has shape .5, 3. on this rank, where .* say .6, 3."):
            torch_overlay.Transfer([odd], [torch.zeros(12, 3)])

    def test_fused_projections_change_their_mesh_and_bring_gradients_back(self):
        """Trees and single tensors, to and from a mesh of some of the ranks."""
        mesh, two = make_root(range(WORLD), (4, 2), ("dp", "tp")), make_root((5, 2), (2,), ("tp",))
        fused, whole = _StridedShard(0, split_factor=2), torch.arange(42.0).reshape(14, 3)
        source = distribute_tensor(whole, mesh, [Shard(1), fused], src_data_rank=None).requires_grad_()
        plain = distribute_tensor(whole + 1, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        for placements in ([fused], [Shard(0)], [Replicate()]):
            tree = {"fused": source, "plain": plain}
            text = str(torch_overlay.explain(tree, placements, device_mesh=two))
            moved = torch_overlay.redistribute(tree, two, placements)
            if two.get_coordinate() is not None:
                for name, values in (("fused", whole), ("plain", whole + 1)):
                    cut = distribute_tensor(values, two, placements, src_data_rank=None)
                    self.assertTrue(torch.equal(moved[name].to_local(), cut.to_local()), f"{name} {placements}")
            self.assertIn(f"{2 if placements == [fused] else 1} tensor", text.partition("one by one")[0])
            moved["fused"].to_local().sum().backward()
            self.assertTrue(torch.equal(source.grad.to_local(), torch.ones_like(source.to_local())))
            source.grad = None

    def test_what_torch_cuts_otherwise_than_fsdp2_is_refused(self):
        """9 rows on (4, 2): of the last ranks torch gives the first one a row, and FSDP2 the second."""
        mesh, rows = make_root(range(WORLD), (4, 2), ("dp", "tp")), torch.arange(9.0)
        cut = distribute_tensor(rows, mesh, (_StridedShard(0, split_factor=2), Shard(0)), src_data_rank=None)
        with self.assertRaisesRegex(ValueError, "has shape .1,. on rank 6, where .* say .0,.: say with piece"):
            torch_overlay.Transfer([cut], [torch.zeros(9)])

    def test_whole_tensors_are_distributed_as_uneven_strided_shards(self):
        """The values of the first rank, as everywhere else; where torch says so, nothing is sent."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        copies = make_root(range(WORLD), (2, 2, 2), ("r", "dp", "tp"))
        strided = _StridedShard(0, split_factor=2), Shard(0)
        for rows in (16, 10, 5, 2, 1, 0):
            whole = torch.arange(rows * 3.0).reshape(rows, 3)
            for on, placements in ((mesh, strided), (copies, (Replicate(), *strided))):
                for source, given in ((0, whole + self.rank), (None, whole.clone())):
                    found = distribute_tensor(given.detach().requires_grad_(), on, placements, src_data_rank=source)
                    self.assertTrue(torch.equal(found.to_local(), chunks(whole, on, "tp", "dp")), f"{rows} {source}")
                    self.assertEqual((found.placements, found.shape), (tuple(placements), whole.shape))
                    self.assertTrue(found.requires_grad and found.is_leaf)
                    self.assertTrue(torch.equal(found.full_tensor(), whole))
