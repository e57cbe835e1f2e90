"""What is refused on real ranks: at once on the rank that is at fault, and on all that could know."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import torch_overlay
from mesh_ranks import WORLD, make_root


def _fake():
    with FakeTensorMode():
        return torch.zeros(4, 4)


def _meta(mesh):
    with torch.device("meta"):
        return DTensor.from_local(torch.zeros(4, 4), mesh, [Replicate()], run_check=False)


def _wrapped(mesh):
    return DTensor.from_local(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)), mesh, [Replicate()], run_check=False)


# What some rank gives in place of a tensor, and what all ranks hear of it.
ODD = (
    (lambda mesh: _meta(mesh), "'w' is on meta and has no memory: materialise it first, as to_empty"),
    (lambda mesh: _fake(), "'w' is a FakeTensor, and a transfer moves plain tensors"),
    (lambda mesh: _wrapped(mesh), "'w' is a TwoTensor, and a transfer moves plain tensors"),
    (lambda mesh: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "'w' is nested"),
    (lambda mesh: torch.zeros(4, 4).to_sparse(), "'w' is sparse_coo, and a transfer moves dense tensors"),
    (
        lambda mesh: torch.quantize_per_tensor(torch.ones(4, 4), 0.5, 0, torch.qint8),
        r"'w' is quantised \(qint8\), and its scales wouldn't travel: give int_repr\(\) and the scales",
    ),
    (
        lambda mesh: torch.nn.Linear(2, 2),
        r"'w' is a module \(Linear\); a transfer takes tensors: give dict\(module.named_parameters\(\)\)",
    ),
)


REFUSED = (
    ("max", torch.complex64, "complex numbers are only added"),
    ("bor", torch.float32, "only whole numbers are taken bit by bit"),
    ("sum", torch.int16, "gloo has no reductions of this type"),
    ("avg", torch.int64, "an average of whole numbers may be none"),
)
SECONDS = 3


class RefusalCases:
    """Cases for ``EightRanks``."""

    def test_what_torch_does_not_reduce_is_refused_on_every_rank(self):
        """Before anything is sent, also where a rank would only receive."""
        mesh, other = make_root(range(4), (4,), ("dp",)), make_root(range(4, 8), (4,), ("tp",))
        for op, dtype, why in REFUSED:
            source = DTensor.from_local(torch.ones(8, dtype=dtype), mesh, [Partial(op)], run_check=False)
            with self.assertRaisesRegex(ValueError, f"of {dtype} with .* can't change its mesh: {why}"):
                torch_overlay.redistribute([source], other, Shard(0))

    def test_what_has_no_elements_in_memory_is_refused_on_every_rank_by_name(self):
        """When the Transfer is made, whichever rank gives it, on either side; the others don't wait for the timeout."""
        mesh = make_root(range(WORLD), (WORLD,), ("dp",))
        for number, (odd, said) in enumerate(ODD):
            who, side = number % WORLD, number % 2
            trees = [{"w": torch.ones(4, 4)}, {"w": torch.zeros(4, 4)}]
            if self.rank == who:
                trees[side]["w"] = odd(mesh)
            begun = time.monotonic()
            with self.assertRaisesRegex(ValueError, f"rank {who}: The {('source', 'target')[side]} {said}"):
                torch_overlay.Transfer(*trees)
            self.assertTrue(time.monotonic() - begun < SECONDS, said)

    def test_any_error_of_one_rank_that_reads_its_trees_is_heard_by_all_at_once(self):
        """With its own traceback on that rank."""

        def names(path):
            if self.rank == 6:
                raise AttributeError("no such attribute")
            return path

        tree = {"w": torch.ones(4)}
        lookup = {"w": "v"} if self.rank == 2 else {"w": 3} if self.rank == 3 else {}
        begun = time.monotonic()
        for given, said, cause in (
            (names, "rank 6: AttributeError: no such attribute", (6, AttributeError)),
            (lambda path: {}[path] if self.rank == 1 else path, "rank 1: KeyError: 'w'", (1, KeyError)),
            (lookup, "rank 3: names gives 3 for 'w'; it gives a name, or a tuple of names", (3, TypeError)),
        ):
            with self.assertRaisesRegex(ValueError, said) as raised:
                torch_overlay.Transfer(tree, {"w": torch.zeros(4)}, names=given)
            if self.rank == cause[0]:
                self.assertTrue(isinstance(raised.exception.__cause__, cause[1]))
        for given, said in (
            (torch.nn.Linear(2, 2), r"The source is a module \(Linear\)"),
            (torch.nn.Linear(2, 2).named_parameters(), r"The source is a generator; .* give dict\(...\) of its pairs"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                torch_overlay.Transfer(given if self.rank == 4 else tree, {"w": torch.zeros(4)})
        self.assertTrue(time.monotonic() - begun < 2 * SECONDS)

    def test_budgets_may_differ_and_strict_may_not(self):
        """All use the least budget, so that they run equally many exchanges."""
        source = {"w": torch.arange(4096.0)} if self.rank == 0 else None
        target = torch.zeros(4096)
        with torch_overlay.Transfer(source, {"w": target}, budget=(16 << 10) << (self.rank % 3)) as transfer:
            transfer.run()
            counts = [None] * WORLD
            dist.all_gather_object(counts, transfer.exchanges)
            self.assertEqual(len({*counts}), 1)
            self.assertTrue(transfer.exchanges > 1 and transfer.staging <= 16 << 10)
        self.assertEqual(target, torch.arange(4096.0))
        begun = time.monotonic()
        with self.assertRaisesRegex(ValueError, "got strict=True on ranks 0, .*7, and strict=False on rank 5"):
            torch_overlay.Transfer(source, {"w": target}, strict=self.rank != 5)
        self.assertTrue(time.monotonic() - begun < SECONDS)

    def test_a_slice_that_other_ranks_have_another_of(self):
        """Each rank would plan for its own `mesh["a"]`, and some get another one's values; stock refuses it, too."""
        mesh = make_root(range(4), (2, 2), ("a", "b"))
        if self.rank >= 4:
            return
        tensor = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        own = distribute_tensor(torch.arange(8.0).view(4, 2), mesh["a"], [Shard(0)], src_data_rank=None)
        said = r"needs meshes that are the same on all of them, and got a slice over ranks \d, \d: ranks? .* of its"
        for given, to in ((tensor, mesh["a"]), (own, mesh["b"])):
            with self.assertRaisesRegex(ValueError, said):
                torch_overlay.redistribute([given], to, Replicate())
        every = DeviceMesh(mesh.device_type, (3, 1, 2, 0), _init_backend=False)
        moved = torch_overlay.redistribute([tensor], every, Replicate())[0]
        self.assertEqual(moved.to_local(), torch.arange(8.0).view(4, 2))

    def test_terms_of_a_norm_are_no_plain_sum(self):
        """They are powers while they are brought together, and the root is taken then: on their own mesh only."""
        mesh, other = make_root(range(4), (4,), ("dp",)), make_root(range(4, 8), (4,), ("tp",))
        norm = None
        if self.rank < 4:
            norm = torch.linalg.vector_norm(DTensor.from_local(torch.full((2,), 2.0), mesh, [Shard(0)]))
            self.assertTrue(norm.placements[0].is_partial() and type(norm.placements[0]) is not Partial)
        target = DTensor.from_local(torch.zeros(()), other, [Replicate()], run_check=False)
        with self.assertRaisesRegex(
            ValueError, "ranks 0-3: '0' has a pending _NormPartial. Redistribute it on its mesh"
        ):
            torch_overlay.Transfer(norm and [norm], [target] if self.rank > 3 else None)
        whole = norm.redistribute(placements=[Replicate()]) if norm is not None else None
        with torch_overlay.Transfer(norm and [whole], [target] if self.rank > 3 else None) as transfer:
            transfer.run()
        self.assertEqual(target.to_local() if self.rank > 3 else norm.full_tensor(), torch.tensor(32.0).sqrt())

    def test_one_tensor_of_another_shape_is_an_error_at_once(self):
        """On the rank that holds it, before it sends anything; those that wait for it meet the group's timeout, and
        ranks that don't deal with it go on."""
        mesh = make_root(range(WORLD), (2, 4), ("dp", "tp"))
        rows = 3 if self.rank == 5 else 4
        tensor = DTensor.from_local(
            torch.ones(rows, 4), mesh, [Shard(0), Replicate()], run_check=False, shape=(8, 4), stride=(4, 1)
        )
        distributed_c10d._set_pg_timeout(timedelta(seconds=SECONDS), mesh.get_group("dp"))
        dist.barrier()
        begun = time.monotonic()

        def whole():
            return tensor.redistribute(placements=[Replicate(), Replicate()]).to_local()

        if self.rank == 5:
            said = r"on rank 5 it has shape \(3, 4\). Nothing was sent. Give DTensor.from_local the true"
            with self.assertRaisesRegex(ValueError, said):
                whole()
            self.assertTrue(time.monotonic() - begun < SECONDS)
        elif self.rank == 1:  # the other one of its dp group
            with self.assertRaisesRegex(RuntimeError, f"Timed out waiting {SECONDS}000ms"):
                whole()
            self.assertTrue(time.monotonic() - begun < SECONDS + 5)
        else:
            self.assertEqual(whole(), torch.ones(8, 4))
        dist.barrier()
