"""A checkpoint as the source of a transfer on real ranks: whose bits come, who reads what, and what stops a run."""

import contextlib
import errno
import json
import math
import os
import random
import re
import shutil
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_overlay
from mesh_ranks import WORLD, make_root
from on_device import from_host
from rank_loads import chunks
from rank_transfers import allocated
from rank_weights import same
from torch_overlay.transfers import checkpoint, hosts
from torch_overlay.transfers._planner import relay
from vllm_stand_in import SPARSE, Model
from width import NIGHTLY

KINDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


def raw(tensor):
    """The bytes of a tensor, in order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write(path, tensors, change=lambda header: None, cut=0, extra=b""):
    """A safetensors file with tensors in the order of the dict, which needn't lie aligned."""
    header, at, data = {"__metadata__": {"format": "pt"}}, 0, []
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]
        }  # fmt: skip
        at += tensor.nbytes
        data.append(raw(tensor))
    change(header)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + b"".join(data) + extra
    with open(path, "wb") as file:
        file.write(whole[: len(whole) - cut])


def write_folder(folder, tensors, files=1):
    """A checkpoint of several files with an index, or one file without."""
    if files == 1:
        write(f"{folder}/model.safetensors", tensors)
        return
    names, weight_map = [*tensors], {}
    for number in range(files):
        some = names[number::files]
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        write(f"{folder}/{file}", {name: tensors[name] for name in some})
        weight_map |= dict.fromkeys(some, file)
    with open(f"{folder}/model.safetensors.index.json", "w") as index:
        json.dump({"metadata": {}, "weight_map": weight_map}, index)


SHAPES = (
    (5, 40, 7),
    (16, 6),
    (40, 9),
    (17, 3, 5),
    (1, 700),
    (2, 3, 4, 5),
    (0, 4),
    (3, 0),
    (),
    (),
    (9,),
    (1,),
    (33,),
    (2000,),
)


@from_host
def drawn(shape, kind, seed):
    """A tensor of any bits that its type has."""
    size, bits = math.prod(shape) * kind.itemsize, torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if kind == torch.bool else 256, (size,), dtype=torch.uint8, generator=bits)
    return data.view(kind).reshape(shape)


def weights(seed):
    """Tensors of all types: empty ones, scalars, a long row; most don't begin aligned in their file."""
    rng = random.Random(seed)
    shapes = [*SHAPES, *[(rng.randint(1, 40), rng.randint(1, 30)) for _ in range(6)]]
    kinds = [*KINDS]
    rng.shuffle(shapes)
    rng.shuffle(kinds)
    kind_of = [kinds[number % len(kinds)] for number in range(len(shapes))]
    return {f"layers.{n}": drawn(shape, kind, seed * 100 + n) for n, (shape, kind) in enumerate(zip(shapes, kind_of))}


def equal(one, other):
    """To the bit; where a cast made NaN, but for which NaN it is."""
    if one.dtype == torch.float32:
        return same(one, other)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and raw(one) == raw(other)


class CheckpointCases:
    """Cases for ``EightRanks``."""

    @contextlib.contextmanager
    def folder(self):
        """One that all ranks see; rank 0 makes it, and removes it when all are done."""
        said = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(said)
        try:
            yield said[0]
            dist.barrier()
        finally:
            if self.rank == 0:
                shutil.rmtree(said[0])

    @contextlib.contextmanager
    def counted_reads(self):
        """A list of the bytes of each preadv."""
        sizes, preadv = [], os.preadv

        def counted(*args):
            size = preadv(*args)
            sizes.append(size)
            return size

        with mock.patch("os.preadv", counted):
            yield sizes

    def total(self, number):
        every = [None] * WORLD
        dist.all_gather_object(every, number)
        return sum(every)

    def write(self, folder, tensors, files=1):
        if self.rank == 0:
            write_folder(folder, tensors, files)
        dist.barrier()

    def loaded(self, whole, mesh, placements, dtype=None):
        """A DTensor of junk that is to become `whole`, and what this rank holds of it then."""
        cast = whole.to(dtype or whole.dtype)
        if type(placements[0]) is _StridedShard and mesh.get_coordinate() is not None:  # as FSDP2 x TP, also unevenly
            local = chunks(cast, mesh, "tp", "dp")
            want = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=cast.shape, stride=cast.contiguous().stride()
            )
        else:
            want = distribute_tensor(cast, mesh, placements, src_data_rank=None)
        junk = torch.ones_like(want._local_tensor)
        return DTensor.from_local(junk, mesh, placements, run_check=False, shape=want.shape, stride=want.stride()), want

    def test_any_shards_get_the_bits_of_the_files_and_each_byte_is_read_once(self):
        dense = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        half = make_root(range(4), (2, 2), ("dp", "tp"))
        copies = make_root(range(WORLD), (2, 4), ("r", "dp"))
        cuts = (
            (dense, (Shard(0), Shard(0))),
            (dense, (_StridedShard(0, split_factor=2), Shard(0))),
            (dense, (Shard(0), Shard(1))),
            (dense, (Replicate(), Shard(1))),
            (copies, (Replicate(), Shard(0))),
            (copies, (Replicate(), Replicate())),
            (half, (Shard(0), Shard(1))),
        )
        for seed in range(12 if NIGHTLY else 4):
            rng = random.Random(seed)
            tensors, files = weights(seed), rng.choice((1, 3))
            readers = rng.sample(range(WORLD), rng.choice((1, 3, WORLD)))
            target, wanted = {}, {}
            for name, whole in tensors.items():
                mesh, placements = rng.choice(cuts)
                dtype = torch.float32 if whole.dtype in (torch.bfloat16, torch.float64) and rng.random() < 0.7 else None
                fits = all(p.is_replicate() or p.dim < whole.ndim for p in placements)
                if not fits or rng.random() < 0.15:
                    target[name] = torch.full_like(whole, 1, dtype=dtype)  # plain: each rank has all of it
                    wanted[name] = whole.to(dtype or whole.dtype)
                else:
                    target[name], want = self.loaded(whole, mesh, placements, dtype)
                    wanted[name] = want._local_tensor
                    if mesh.get_coordinate() is None:
                        del target[name]
            budget = rng.choice((1 << 12, 1 << 14, 1 << 20))
            with self.folder() as folder:
                self.write(folder, tensors, files)
                source = torch_overlay.checkpoint(folder) if self.rank in readers else None
                relays = (False, True, None)[seed % 3]  # None decides by the links of the hosts
                host = rng.choice((None, f"host {self.rank // 3}")) if relays is not False else None
                with (
                    mock.patch.object(relay, "STRIPE", 64),
                    mock.patch.object(checkpoint, "OWN", (16, 1 << 20, 200)[seed % 3]),
                    mock.patch.object(hosts, "LEAST", 0),
                    torch_overlay.Transfer(source, target, budget=budget, relay=relays, host=host) as transfer,
                ):
                    for _ in range(2):
                        with self.counted_reads() as sizes:
                            transfer.run()
                        for name, tensor in target.items():
                            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                            self.assertTrue(equal(local, wanted[name]), f"{seed} {name} {wanted[name].dtype}")
                        size = sum(tensor.nbytes for tensor in tensors.values())
                        self.assertEqual(self.total(sum(sizes)), size, f"{seed} {readers}")
                        share = -(-size * 5 // len(readers) // 4) + 2 * 30 * 8  # rows
                        self.assertTrue(sum(sizes) <= share if source else not sizes, (sum(sizes), share))

    def test_each_host_gets_each_byte_once(self):
        """Without a word of `relay`: four hosts of two replicas each, all of which read."""
        torch.manual_seed(7)
        whole, target = {"w": torch.randn(512, 256)}, {"w": torch.zeros(512, 256)}
        with self.folder() as folder:
            self.write(folder, whole, 1)
            source = torch_overlay.checkpoint(folder)
            with (
                mock.patch.object(hosts, "LEAST", 0),
                torch_overlay.Transfer(source, target, host=f"host {self.rank // 2}") as sync,
            ):
                sync.run()
                out, into = torch_overlay.explain(sync).links()
        self.assertEqual(target["w"], whole["w"])
        size = whole["w"].nbytes
        for number in range(4):  # each read a quarter
            self.assertTrue(into[f"host {number}"] <= 3 * size / 4)
            self.assertTrue(out[f"host {number}"] <= 1.01 * 3 * size / 4)

    def test_a_run_stays_within_its_budget(self):
        """Also where each rank wants all of it, many times what is read at a time."""
        tensors = {f"w{n}": drawn((512, 1024 + n), torch.float32, n) for n in range(8)}
        mesh, budget = make_root(range(WORLD), (WORLD,), ("dp",)), 1 << 20
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self.folder() as folder:
            self.write(folder, tensors, 2)
            for placement in (Shard(0), Replicate()):
                sides = {name: self.loaded(whole, mesh, [placement]) for name, whole in tensors.items()}
                target = {name: side[0] for name, side in sides.items()}
                source = torch_overlay.checkpoint(folder)
                with torch_overlay.Transfer(source, target, budget=budget) as transfer:
                    self.assertTrue(transfer.staging <= budget)
                    with self.counted_reads() as sizes:
                        (memory,) = allocated([transfer.run])  # runs twice
                    self.assertTrue(memory.peak <= 2 * budget < size // WORLD, (memory, budget, size))
                    self.assertEqual((memory.kept, self.total(sum(sizes))), (0, 2 * size))
                for name, (got, want) in sides.items():
                    self.assertTrue(equal(got._local_tensor, want._local_tensor), name)

    def test_four_ranks_load_what_other_loaders_load(self):
        """Beside `safetensors.torch.load_file`, where it is installed, on a group of four ranks."""
        tensors = weights(7)
        with self.folder() as folder:
            self.write(folder, tensors)
            whole = tensors
            with contextlib.suppress(ImportError):
                from safetensors.torch import load_file

                whole = load_file(f"{folder}/model.safetensors")
            mesh = make_root(range(4), (2, 2), ("dp", "tp"))
            if self.rank < 4:
                target = {
                    name: self.loaded(each, mesh, [Shard(0), Shard(each.ndim - 1)])[0]
                    if each.ndim
                    else torch.ones_like(each)
                    for name, each in whole.items()
                }
                source = torch_overlay.checkpoint(folder)
                with torch_overlay.Transfer(source, target, group=[0, 1, 2, 3], budget=1 << 13) as transfer:
                    transfer.run()
                for name, each in whole.items():
                    got, want = target[name], each
                    if each.ndim:
                        got = got._local_tensor
                        want = distribute_tensor(each, mesh, target[name].placements, src_data_rank=None)._local_tensor
                    self.assertTrue(equal(got, want), name)

    def test_options_of_any_transfer(self):
        """Two names for one tensor, which is read once; a name that only one side has; parts; the background; bind."""
        tensors = {f"w{n}": drawn((24, 8), torch.float32, n) for n in range(4)}
        names = {"w0": ("a", "b"), "w1": "c"}
        wanted = {"a": tensors["w0"], "b": tensors["w0"], "c": tensors["w1"], "w2": tensors["w2"]}
        mesh = make_root(range(WORLD), (4, 2), ("dp", "tp"))
        with self.folder() as folder:
            self.write(folder, tensors, 2)
            source = torch_overlay.checkpoint(folder)

            def fresh():
                found = {name: self.loaded(whole, mesh, [Shard(0), Shard(1)])[0] for name, whole in wanted.items()}
                found["c"] = (
                    tuple(torch_overlay.piece(torch.ones(24, 4), (24, 8), (0, at)) for at in (0, 4) if self.rank < 2)
                    or None
                )
                return found

            def check(target, moved):
                for name, whole in wanted.items():
                    if name == "c":
                        for piece in target["c"] or ():
                            want = whole[:, piece.start[1] :][:, :4] if name in moved else torch.ones(24, 4)
                            self.assertTrue(equal(piece._local_tensor, want), name)
                    else:
                        local = target[name]._local_tensor
                        want = distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None)._local_tensor
                        self.assertTrue(equal(local, want if name in moved else torch.ones_like(want)), name)

            target = fresh()
            with self.assertRaisesRegex(ValueError, "the source has 'w3', and the target doesn't"):
                torch_overlay.Transfer(source, target, names=names)
            with torch_overlay.Transfer(source, target, names=names, strict=False, budget=1 << 12) as transfer:
                self.assertEqual(transfer.left_out, {"source": ("w3",), "target": ()})
                with self.counted_reads() as sizes:
                    transfer.run(only=["b", "w2"])
                self.assertTrue(self.total(sum(sizes)) == 2 * 24 * 8 * 4)
                check(target, ("b", "w2"))
                with self.counted_reads() as sizes:
                    transfer.run(async_op=True).wait()
                self.assertEqual(self.total(sum(sizes)), 3 * 24 * 8 * 4)
                check(target, wanted)
                target = fresh()
                transfer.bind(target=target)
                transfer.run(async_op=True, snapshot=True).wait()
                check(target, wanted)
                with self.assertRaisesRegex(TypeError, "is a Checkpoint"):
                    transfer.bind(source=source)

    def test_a_loader_of_fused_weights(self):
        """The landings of a server's own loader, on two servers of four ranks."""
        model, wanted = (Model(SPARSE, 4, self.rank % 4) for _ in range(2))
        tensors = {}
        for number, (name, (shape, _)) in enumerate(model.checkpoint().items()):
            tensors[name] = drawn(shape, torch.float32, number).nan_to_num()
        wanted.load_weights([*tensors.items()])
        with self.folder() as folder:
            self.write(folder, tensors, 3)
            found = torch_overlay.landings(model.load_weights, model, tensors)
            source = torch_overlay.checkpoint(folder)
            with torch_overlay.Transfer(source, found.target(), strict=False, budget=1 << 13) as transfer:
                transfer.run()
            found.load_whole()
            for (name, got), want in zip(model.named_parameters(), wanted.parameters(), strict=True):
                self.assertTrue(same(got, want) and got.any(), name)

    def test_what_is_wrong_is_said_on_all_ranks_before_anything_is_written(self):
        tensors = {"w": drawn((16, 8), torch.float32, 0), "v": drawn((16, 8), torch.float32, 1)}
        target = {name: torch.ones(16, 8) for name in tensors}
        with self.folder() as folder:
            self.write(folder, tensors)
            path = f"{folder}/model.safetensors"
            with self.assertRaisesRegex(ValueError, "rank 2: checkpoint.'/nowhere'.: No such file or directory"):
                torch_overlay.Transfer(torch_overlay.checkpoint("/nowhere" if self.rank == 2 else folder), target)
            with self.assertRaisesRegex(ValueError, "is a checkpoint on ranks 0-6, and tensors on rank 7"):
                torch_overlay.Transfer(target if self.rank == 7 else torch_overlay.checkpoint(folder), target)
            with self.assertRaisesRegex(ValueError, "changes= compares tensors of two runs, and the source is a check"):
                torch_overlay.Transfer(torch_overlay.checkpoint(folder), target, changes=True)
            block = torch.ones(16, 8)
            with self.assertRaisesRegex(ValueError, "'v', 'w' are one block.*the checkpoint has 'w' and 'v' for them"):
                torch_overlay.Transfer(torch_overlay.checkpoint(folder), {"w": block, "v": block})
            with torch_overlay.Transfer(
                torch_overlay.checkpoint(folder),
                {"a": block, "b": block},
                names={"w": ("a", "b"), "v": "c"},
                strict=False,
            ) as transfer:
                transfer.run()
            self.assertTrue(equal(block, tensors["w"]))
            with self.assertRaisesRegex(ValueError, "'w' is float32 in the source and int32 in the target"):
                torch_overlay.Transfer(torch_overlay.checkpoint(folder), {**target, "w": torch.ones(16, 8).int()})
            with self.assertRaisesRegex(ValueError, "'w' has shape .16, 8. in the source and .8, 16. in the target"):
                torch_overlay.Transfer(torch_overlay.checkpoint(folder), {**target, "w": torch.ones(8, 16)})
            words = r"checkpoint is read into one half, and 64 are left.* Give at least (\d+) bytes\.$"
            with self.assertRaisesRegex(ValueError, words) as caught:
                torch_overlay.Transfer(torch_overlay.checkpoint(folder), target, budget=128)
            enough = int(re.search(words, str(caught.exception))[1])
            torch_overlay.Transfer(torch_overlay.checkpoint(folder), target, budget=enough).close()
            own = f"{folder}/own"
            if self.rank == 3:
                os.mkdir(own)
                write(f"{own}/model.safetensors", {**tensors, "v": torch.ones(8, 16)})
            where = own if self.rank == 3 else folder
            with self.assertRaisesRegex(
                ValueError, r"ranks 0, 3 see different.*'v' of model.safetensors is float32 of shape \[16, 8\]"
            ):
                torch_overlay.Transfer(torch_overlay.checkpoint(where), target)
            with torch_overlay.Transfer(torch_overlay.checkpoint(folder), target) as transfer:
                dist.barrier()
                if self.rank == 0:
                    write(path, {"v": tensors["w"], "w": tensors["v"]})
                    os.utime(path, (1, 1))
                dist.barrier()
                with self.assertRaisesRegex(ValueError, "nothing was sent.*model.safetensors was written again since"):
                    transfer.run()
            self.assertTrue(all((tensor == 1).all() for tensor in target.values()))
            source = torch_overlay.checkpoint(folder)
            for _ in range(2):  # the second one reads the headers of files that have changed
                with torch_overlay.Transfer(source, target) as transfer:
                    transfer.run()
                self.assertTrue(equal(target["v"], tensors["w"]))
                dist.barrier()
                if self.rank == 0:
                    write(path, {**tensors, "v": tensors["w"]})
                dist.barrier()

    def test_a_file_that_changes_while_it_is_read_tears_the_targets(self):
        """One rank finds the end of its file, or an error, or another file, in a later round."""
        tensors = {"first": drawn((2048,), torch.float32, 0), "last": drawn((2048,), torch.float32, 1)}
        with self.folder() as folder:
            path = f"{folder}/model.safetensors"
            for kind, said in (
                ("first", "'last': .*Input/output error"),
                ("end", "'last': .*model.safetensors ends at byte"),
                ("error", "'last': .*Input/output error"),
                ("short", "model.safetensors has 100 bytes and had|model.safetensors ends at byte"),
            ):
                self.write(folder, tensors)
                target = {name: torch.ones(2048) for name in tensors}
                source = torch_overlay.checkpoint(folder) if self.rank in (1, 6) else None
                transfer = torch_overlay.Transfer(source, target, budget=1 << 13)
                preadv, calls = os.preadv, []

                def read(*args, preadv=preadv, calls=calls, kind=kind):
                    calls.append(args)
                    # Both readers have sent the first round when one of them reads ahead for the third.
                    if self.rank == 6 and len(calls) == {"first": 1, "short": 3}.get(kind, 2):
                        if kind == "end":
                            return 0
                        if kind in ("first", "error"):
                            raise OSError(errno.EIO, os.strerror(errno.EIO))
                        os.truncate(path, 100)
                    return preadv(*args)

                state = "no target was written" if kind == "first" else "some targets are new and others not"
                with (
                    mock.patch("os.preadv", read),
                    self.assertRaisesRegex(RuntimeError, f"{state}(?s:.*)({said})"),
                ):
                    transfer.run()
                transfer.close()
                dist.barrier()
