"""Shards that no placements say: tensors whose local ones have a chunk list, as Megatron-FSDP attaches it."""

import random

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import DEVICE

SHAPE = (37, 6)


def uneven(rng, whole, mesh, rank, fill=None):
    """A DTensor of rows that are cut anywhere, some ranks without any, in the memory of a padded buffer; its start."""
    edges = [0, *sorted(rng.randrange(len(whole) + 1) for _ in range(WORLD - 1)), len(whole)]
    first, last = edges[rank : rank + 2]
    buffer = torch.full((last - first + 5, whole.shape[1]), -1.0, device=DEVICE)
    local = buffer[3 : 3 + last - first]
    local.copy_(whole[first:last] if fill is None else torch.full_like(local, fill))
    attach(local, [(first, 0)], [local.shape])
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    if made._local_tensor is not local:  # from_local takes a view
        attach(made._local_tensor, [(first, 0)], [local.shape])
    return made, buffer, slice(first, last)


def attach(local, starts, sizes):
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in zip(starts, sizes)]
    local.__create_chunk_list__ = lambda: chunks


class Flat(Shard):
    """As newer Megatron-FSDP calls its shards, which are any rows."""

    def __init__(self):
        super().__init__(0)


def megatron(whole, mesh, rank, rng, placement, fill=None):
    """A DTensor as Megatron-FSDP makes it of a chunk of tensor parallelism: its rows are cut anywhere, some ranks have
    none, and its local tensor has a chunk list."""
    dp, tp = mesh.get_coordinate()
    part = whole.chunk(mesh.size(1))[tp]
    edges = [0, *sorted(rng.randrange(len(part) + 1) for _ in range(mesh.size(0) - 1)), len(part)]
    rows = part[edges[dp] : edges[dp + 1]]
    local = rows.clone() if fill is None else torch.full_like(rows, fill)
    made = DTensor.from_local(
        local, mesh, [placement, Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    first = sum(map(len, whole.chunk(mesh.size(1))[:tp])) + edges[dp]
    attach(made._local_tensor, [(first, 0)], [local.shape])
    return made, rows


def block_sharded(whole, blocks, dim, rank):
    """This rank's shard and its layout, as FlexShard's BlockShard says them; Owned is all blocks on one rank."""
    size = whole.shape[dim] // sum(blocks)
    start, length = sum(blocks[:rank]) * size, blocks[rank] * size
    local = whole.narrow(dim, start, length).clone()
    offset = tuple(start if at == dim else 0 for at in range(whole.ndim))
    chunks = (offset,) if length else ()
    return local, (whole.shape, chunks, ((0,) * whole.ndim,) * len(chunks), (tuple(local.shape),) * len(chunks))


def laid_out(local, layout):
    """The tensor with the fields that torch's CheckpointableTensor has, as FlexShard puts them into a state dict."""
    made = local.detach()
    for field, value in zip(("global_shape", "global_offsets", "local_offsets", "local_sizes"), layout, strict=True):
        setattr(made, field, value)
    return made


class Parts(torch.Tensor):
    """Two column blocks of a whole in two tensors of their own, by DCP's protocol; no DTensor."""

    @staticmethod
    def __new__(cls, parts, starts, size):
        made = torch.Tensor._make_wrapper_subclass(cls, size)
        made.parts, made.starts = parts, starts
        return made

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(s), p.shape) for s, p in zip(self.starts, self.parts)]

    def __create_write_items__(self, fqn, tensor):
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size()),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts)
        ]

    def __get_tensor_shard__(self, index):
        return self.parts[[torch.Size(start) for start in self.starts].index(index.offset)]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of what has no memory")


class ChunkCases:
    """Cases for ``EightRanks``."""

    def test_chunk_lists_on_either_side(self):
        """What placements say instead would be an error, or other rows."""
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        whole = torch.arange(37.0 * 6).reshape(SHAPE)
        for seed in range(4):
            rng = random.Random(seed)
            source, _, _ = uneven(rng, whole, mesh, self.rank)
            target, buffer, rows = uneven(rng, whole, mesh, self.rank, fill=7)
            even = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)], src_data_rank=None)
            for given, into in ((source, target), (source, even), (even, target)):
                target._local_tensor.fill_(7)
                with torch_overlay.Transfer({"w": given}, {"w": into}) as transfer:
                    transfer.run()
            self.assertTrue(torch.equal(even._local_tensor, distribute_tensor(whole, mesh, [Shard(1)]).to_local()))
            self.assertTrue(torch.equal(target._local_tensor, whole[rows]))
            self.assertTrue((buffer[:3] == -1).all() and (buffer[3 + rows.stop - rows.start :] == -1).all())

    def test_what_a_run_finds_is_what_is_moved(self):
        """The local tensor of now, as of any DTensor; a chunk list that has changed is an error on all ranks."""
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        whole = torch.arange(37.0 * 6).reshape(SHAPE)
        source, _, rows = uneven(random.Random(0), whole, mesh, self.rank)
        target, _, _ = uneven(random.Random(1), whole, mesh, self.rank, fill=7)
        with torch_overlay.Transfer(source, target) as transfer:
            before = target._version, target._local_tensor._version
            transfer.run()
            if target._local_tensor.numel():
                after = target._version, target._local_tensor._version
                self.assertTrue(all(one < other for one, other in zip(before, after)))
            source._local_tensor = source._local_tensor + 1000
            attach(source._local_tensor, [(rows.start, 0)], [source._local_tensor.shape])
            transfer.run()
            wanted, _, _ = uneven(random.Random(1), whole + 1000, mesh, self.rank)
            self.assertTrue(torch.equal(target._local_tensor, wanted._local_tensor))
            if self.rank == 2:
                attach(source._local_tensor, [(rows.start + 1, 0)], [source._local_tensor.shape])
            with self.assertRaisesRegex(
                ValueError, "rank 2: the source '' is a part .* begins at .* and was a part of shape"
            ):
                transfer.run()
            if self.rank == 2:
                del source._local_tensor.__create_chunk_list__
            with self.assertRaisesRegex(ValueError, "rank 2: the source '' is none of the parts"):
                transfer.run()

    def test_a_tensor_that_is_no_dtensor(self):
        whole = torch.arange(48.0).reshape(6, 8)
        starts = [(0, self.rank % 4), (3, 4 + self.rank % 4)]
        boxes = [(slice(0, 6), slice(starts[0][1], starts[0][1] + 1)), (slice(3, 6), slice(starts[1][1], None))]
        parts = [whole[box].clone() for box in boxes]
        source = whole.clone() if self.rank == 5 else None
        target = Parts([torch.zeros_like(part) for part in parts], starts, whole.shape)
        with torch_overlay.Transfer(None if source is None else {"w": source}, {"w": target}) as transfer:
            transfer.run()
        for got, want in zip(target.parts, parts, strict=True):
            self.assertTrue(torch.equal(got, want))
        odd = torch.zeros(6, 8)
        attach(odd, [(0, 0)], [(6, 8)])
        with self.assertRaisesRegex(ValueError, "'w' is no DTensor, and has a chunk list, and no write items.*piece()"):
            torch_overlay.Transfer({"w": whole}, {"w": odd})

    def test_megatron_fsdp_over_tensor_parallelism(self):
        """Either side; its placements say other rows."""
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        whole = torch.arange(37.0 * 6).reshape(SHAPE)
        even = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1), Shard(0)], src_data_rank=None)
        for seed, placement in enumerate((_StridedShard(0, split_factor=2), Flat(), Shard(0))):
            source, _ = megatron(whole, mesh, self.rank, random.Random(seed), placement)
            target, wanted = megatron(whole, mesh, self.rank, random.Random(seed + 9), placement, fill=7)
            for given, into in (({"w": source}, {"w": target}), ({"w": source}, {"w": even})):
                with torch_overlay.Transfer(given, into) as transfer:
                    transfer.run()
            self.assertTrue(torch.equal(target.to_local(), wanted))
            cut = distribute_tensor(whole, mesh, [Shard(1), Shard(0)], src_data_rank=None)
            self.assertTrue(torch.equal(even.to_local(), cut.to_local()))
        local = distribute_tensor(whole, mesh, [Shard(1), Shard(0)], src_data_rank=None).to_local().clone()
        silent = DTensor.from_local(
            local, mesh, [Flat(), Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        with self.assertRaisesRegex(ValueError, "a placement of the class Flat; give piece"):
            torch_overlay.Transfer({"w": silent}, {"w": torch.zeros(SHAPE)})

    def test_shards_of_flexshard(self):
        """Blocks on some ranks, a tensor on one rank, several parts in one padded tensor, to and from DTensors."""
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        whole = torch.arange(48.0 * 12).reshape(48, 12)
        blocks, owned = (2, 0, 1, 4, 0, 3, 1, 1), tuple(12 * (rank == 3) for rank in range(WORLD))
        # Tensor parallelism packed two parts of the rows, and each rank has a column slab of what it got.
        tp, columns = self.rank % 2, slice(3 * (self.rank // 2), 3 * (self.rank // 2) + 3)
        packed = torch.full((30, 3), -1.0)
        packed[1:13], packed[15:27] = whole[12 * tp :, columns][:12], whole[24 + 12 * tp :, columns][:12]
        starts = ((12 * tp, columns.start), (24 + 12 * tp, columns.start))
        several = packed, (whole.shape, starts, ((1, 0), (15, 0)), ((12, 3), (12, 3)))
        cases = [block_sharded(whole, blocks, dim, self.rank) for dim in (0, 1)]
        cases += [block_sharded(whole, owned, 0, self.rank), several]
        source = {f"{number}": laid_out(*case) for number, case in enumerate(cases)}
        between = {
            name: distribute_tensor(torch.zeros(48, 12), mesh, [Shard(0)], src_data_rank=None) for name in source
        }
        target = {name: laid_out(local.where(local < 0, 0), layout) for name, (local, layout) in zip(source, cases)}
        for given, into in ((source, between), (between, target)):
            with torch_overlay.Transfer(given, into) as transfer:
                transfer.run()
        for name, value in between.items():
            self.assertTrue(torch.equal(value.to_local(), whole.chunk(WORLD)[self.rank]), name)
            self.assertTrue(torch.equal(target[name], source[name]), name)
        with torch_overlay.Transfer(source, target) as transfer:
            source["3"].global_offsets = starts[::-1]
            with self.assertRaisesRegex(ValueError, "source '3' is a part .* begins at .* and was a part of shape"):
                transfer.run()

    def test_shards_that_do_not_say_their_part(self):
        whole = torch.zeros(48, 12)
        local = whole[: 6 * (self.rank < 4)]
        local._global_shape = whole.shape  # a parameter of FlexShard
        with self.assertRaisesRegex(ValueError, "FlexShard's shard .*set_state_dict_global_layouts.*or say with piece"):
            torch_overlay.Transfer({"w": local}, {"w": whole})
        local, (shape, *_) = block_sharded(whole, (6,) * WORLD, 0, self.rank)
        for layout, said in (
            ((shape, ((0, 0),), (), ((6, 12),)), "different numbers of shards"),
            (
                (shape, ((0, 0),), ((1, 0),), ((6, 12),)),
                "'w' says that it holds .* and its local tensor has shape .6, 12",
            ),
            ((shape, ((43, 0),), ((0, 0),), ((6, 12),)), "isn't inside a whole of shape .48, 12."),
        ):
            with self.assertRaisesRegex(ValueError, said):
                torch_overlay.Transfer({"w": laid_out(local, layout)}, {"w": whole})

    def test_chunk_lists_that_do_not_fit(self):
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        whole = torch.arange(37.0 * 6).reshape(SHAPE)

        def wrong(starts, sizes, placement=Shard(0)):
            made, _, _ = uneven(random.Random(0), whole, mesh, self.rank)
            made = DTensor.from_local(
                made._local_tensor, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            if starts is not None:
                attach(made._local_tensor, starts, sizes or [made._local_tensor.shape])
            return {"w": made}

        target = {"w": torch.zeros(SHAPE)}
        for given, said in (
            (
                wrong([(0, 0)], [(99, 6)]),
                "a part of shape .99, 6. that begins at .0, 0., and its local tensor has.*piece()",
            ),
            (
                wrong([(0, 0), (1, 0)], [(1, 6), (1, 6)]),
                "a chunk list of 2 chunks, and no __get_tensor_shard__.*piece()",
            ),
            (wrong([(36, 3)], None), "isn't inside a whole of shape"),
            (wrong([(0, 0)], None, Partial()), "'w' has shape .* where .Partial.sum.,. say|has a pending reduction"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                torch_overlay.Transfer(given, target)
        plain = wrong(None, None)["w"]
        local = plain._local_tensor.clone()  # without the chunk list
        plain = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        with self.assertRaisesRegex(ValueError, "'w' has shape .*where .* say .*: say with piece.. what it holds"):
            torch_overlay.Transfer({"w": plain}, target)
