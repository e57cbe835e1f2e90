# Owner(s): ["oncall: distributed"]
"""Strided shards in checkpoints: a chunk for each box that a rank holds."""

import contextlib
import itertools
import shutil
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _distribute_tensors
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_from_dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase

from torch_overlay.distributed.tensor._chunks import Cut, cut_runs, is_ambiguous, strided_part


class TestStridedRuns(TestCase):
    """Runs are what the placements cut, from left to right."""

    def _check(self, length: int, kinds, sizes) -> None:
        placements = [_StridedShard(0, split_factor=factor) if factor > 1 else Shard(0) for factor in kinds]
        for coordinate in itertools.product(*map(range, sizes)):
            held = torch.arange(length)
            for placement, size, index in zip(placements, sizes, coordinate):
                held = placement._split_tensor(held, size, with_padding=False, contiguous=False)[0][index]
            cuts = tuple(Cut(0, *cut) for cut in zip(kinds, sizes, coordinate))
            (runs,) = cut_runs((length,), cuts)
            indices = [run.offset + n for run in runs for n in range(run.length)]
            self.assertEqual(indices, held.tolist(), msg=f"{length} rows, {placements} on {sizes} at {coordinate}")
            places = [run.local_offset + n for run in runs for n in range(run.length)]
            self.assertEqual(places, [*range(len(held))])
            adjoin = [a.offset + a.length == b.offset for a, b in itertools.pairwise(runs)]
            self.assertFalse(any(adjoin), msg=f"{runs} could be fewer")

    def test_one_shard(self) -> None:
        for length, factor, size in itertools.product(range(14), (1, 2, 3, 5), (1, 2, 3, 4)):
            self._check(length, (factor,), (size,))

    def test_two_shards_of_one_dim(self) -> None:
        for length, kinds in itertools.product((0, 1, 5, 8, 9, 12, 17, 24), itertools.product((1, 2, 3), repeat=2)):
            for sizes in ((2, 2), (2, 3), (3, 2)):
                self._check(length, kinds, sizes)

    def test_three_shards_of_one_dim(self) -> None:
        for length, kinds in itertools.product((7, 24, 37), itertools.product((1, 2, 3), repeat=3)):
            self._check(length, kinds, (2, 3, 2))


FUSED = _StridedShard(0, split_factor=2)
WHOLE = torch.arange(96).reshape(16, 6)


@contextlib.contextmanager
def raising():
    """A CheckpointException is no Exception: of a rank that is a thread, it ends the thread and not the test."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise AssertionError(error) from error


class TestStridedChunks(DTensorOpTestBase):
    @property
    def world_size(self) -> int:
        return 4

    def _folder(self) -> str:
        """A folder of the test, the same on all ranks."""
        name = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(name, 0)
        if self.rank == 0:
            self.addCleanup(shutil.rmtree, name[0])
        return name[0]

    def _saved(self, state: dict) -> str:
        """The folder of a checkpoint of this state."""
        folder = self._folder()
        with raising():
            dcp.save(state, checkpoint_id=folder)
        return folder

    def _load(self, state: dict, folder: str) -> None:
        with raising():
            dcp.load(state, checkpoint_id=folder)

    def _shard(self, placements, *sizes: int, whole=WHOLE) -> DTensor:
        """A shard as the placements cut it, without communication."""
        mesh = init_device_mesh("cpu", sizes or (self.world_size,))
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    def test_a_load_brings_the_rows_that_a_rank_holds(self) -> None:
        folder = self._saved({"rows": WHOLE})
        held = self._shard([FUSED])
        target = self._shard([FUSED], whole=-WHOLE)
        local = target.to_local()
        self._load({"rows": target}, folder)
        first = 2 * self.rank
        self.assertEqual((local[:, 0] // 6).tolist(), [first, first + 1, first + 8, first + 9])
        self.assertEqual(target.to_local(), held.to_local())
        self.assertEqual(local.data_ptr(), target.to_local().data_ptr())

    def test_what_is_saved_loads_into_any_layout(self) -> None:
        layouts = [
            ([FUSED],),
            ([_StridedShard(1, split_factor=2)],),  # 6 columns in 2 halves of 3, over 4 ranks
            ([FUSED, _StridedShard(1, split_factor=3)], 2, 2),
            ([Shard(1), FUSED], 2, 2),
            ([_StridedShard(0, split_factor=3), FUSED], 2, 2),
            ([_StridedShard(0, split_factor=3), Replicate()], 2, 2),
            ([Replicate(), Shard(1)], 2, 2),
        ]
        folder = self._saved({f"{n}": self._shard(*layout) for n, layout in enumerate(layouts)})
        whole = {f"{n}": torch.full_like(WHOLE, -1) for n in range(len(layouts))}
        self._load(whole, folder)
        for n, layout in enumerate(layouts):
            self.assertEqual(whole[f"{n}"], WHOLE, msg=f"{layout}")
        for layout in layouts:
            targets = {name: self._shard(*layout, whole=-WHOLE) for name in whole}
            self._load(targets, folder)
            for target in targets.values():
                self.assertEqual(target.to_local(), self._shard(*layout).to_local(), msg=f"into {layout}")

    def test_a_chunk_is_a_view(self) -> None:
        held = self._shard([Shard(1), _StridedShard(0, split_factor=4)], 2, 2)
        chunks = held.__create_chunk_list__()
        items = held.__create_write_items__("rows", held)
        self.assertEqual(len(chunks), 4)
        self.assertEqual([item.tensor_data.chunk for item in items], chunks)
        for chunk in chunks:
            part = held.__get_tensor_shard__(MetadataIndex("rows", chunk.offsets))
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
            self.assertEqual(part, WHOLE[box])
            part.fill_(-1)
        self.assertTrue((held.to_local() == -1).all())
        with self.assertRaisesRegex(ValueError, "Could not find shard at"):
            held.__get_tensor_shard__(MetadataIndex("rows", torch.Size([1, 0])))

    def test_one_box_is_one_chunk_as_before(self) -> None:
        shapes = ((16, 6), (5, 3), (1, 6), (0, 2))
        kinds = (Replicate(), Shard(0), Shard(1), FUSED)
        for shape, placements in itertools.product(shapes, itertools.product(kinds, repeat=2)):
            if placements[1] == FUSED and placements[0] in (FUSED, Shard(0)):
                continue  # as FSDP makes them, see below
            held = self._shard(placements, 2, 2, whole=torch.zeros(shape))
            before = _create_chunk_from_dtensor(held)
            chunks = held.__create_chunk_list__()
            if len(chunks) == 1:
                self.assertEqual(chunks, [before])
                self.assertEqual(held.__get_tensor_shard__(MetadataIndex("", before.offsets)), held.to_local())
            else:
                self.assertIn(FUSED, placements)
                self.assertGreater(held.to_local().numel(), 1)
        held = self._shard([FUSED, Shard(0)], 2, 2)  # a chunk of a chunk
        self.assertEqual(held.__create_chunk_list__(), [_create_chunk_from_dtensor(held)])

    def test_fsdp_over_packed_tensor_parallelism_is_refused(self) -> None:
        """On another dim it is right. On the same dim full_tensor() has other rows, too."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = WHOLE.float()  # up to torch 2.11 FSDP lets its shards need gradients first
        for dim in (1, 0):
            packed = distribute_tensor(whole, mesh["tp"], [FUSED], src_data_rank=None)
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda _, dim=dim: Shard(dim))
            if dim:
                for chunk in module.weight.__create_chunk_list__():
                    part = module.weight.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
                    box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
                    self.assertEqual(part, whole[box])
        for call in (
            module.weight.__create_chunk_list__,
            lambda: module.weight.__create_write_items__("weight", module.weight),
            lambda: strided_part(whole, module.weight),
        ):
            with self.assertRaisesRegex(ValueError, "don't tell which rows a rank holds: FSDP"):
                call()

    def test_uneven_fsdp_beside_a_packed_dim_is_refused(self) -> None:
        for rows, num_chunks, is_refused in ((8, 2, False), (9, 2, True), (9, 1, False)):
            cuts = [Cut(0, 2, 2, 0), Cut(0, 1, 2, 0), Cut(1, 2, num_chunks, 0)]
            self.assertEqual(is_ambiguous((rows, 6), cuts), is_refused, msg=f"{rows} rows, {num_chunks}")

    def test_a_local_tensor_says_itself_what_it_holds(self) -> None:
        held = self._shard([FUSED])
        chunks = [ChunkStorageMetadata(torch.Size([0, 0]), held.to_local().shape)]
        held._local_tensor.__create_chunk_list__ = lambda: chunks
        self.assertIs(held.__create_chunk_list__(), chunks)

    def test_another_local_shape_is_left_alone(self) -> None:
        """One of the placements isn't what the shard was cut by."""
        mesh = init_device_mesh("cpu", (4,))
        held = DTensor.from_local(torch.zeros(3, 6), mesh, [FUSED], shape=WHOLE.shape, stride=WHOLE.stride())
        self.assertEqual(held.__create_chunk_list__(), [_create_chunk_from_dtensor(held)])

    def test_a_state_from_rank_0_brings_the_rows_that_a_rank_holds(self) -> None:
        for layout in (([FUSED],), ([_StridedShard(0, split_factor=3), FUSED], 2, 2), ([Shard(0), Shard(0)], 2, 2)):
            expected = self._shard(*layout).to_local()
            for device in ("cpu", "meta"):
                state = {"rows": (self._shard(*layout, whole=-WHOLE.to(device)), WHOLE)}  # as broadcast
                _distribute_tensors(state, ["rows"], torch.device("cpu"))
                self.assertEqual(state["rows"].to_local(), expected, msg=f"{layout}, {device}")

    def test_a_part_of_a_whole_tensor(self) -> None:
        held = self._shard([FUSED, _StridedShard(1, split_factor=3)], 2, 2)
        self.assertEqual(strided_part(WHOLE, held), held.to_local())

    def test_a_safetensors_file_takes_one_chunk_of_a_tensor(self) -> None:
        writer = dcp.HuggingFaceStorageWriter(self._folder(), save_distributed=True)
        with self.assertRaisesRegex(dcp.CheckpointException, "several of 'rows', whose shard is strided"):
            dcp.save({"rows": self._shard([FUSED])}, storage_writer=writer)


if __name__ == "__main__":
    run_tests()
