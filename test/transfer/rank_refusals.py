"""What is refused on real ranks: at once on the rank that is at fault, and on all that could know."""

import contextlib
import itertools
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_overlay
from mesh_ranks import WORLD, make_root
from torch_overlay.transfers.exchanges import Exchanges

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
        """Before anything is sent, also where a rank would only receive. Torch refuses it on ranks that reduce."""
        mesh, other = make_root(range(4), (4,), ("dp",)), make_root(range(4, 8), (4,), ("tp",))
        for op, dtype, why in REFUSED:
            source = DTensor.from_local(torch.ones(8, dtype=dtype), mesh, [Partial(op)], run_check=False)
            target = DTensor.from_local(torch.zeros(2, dtype=dtype), other, [Shard(0)], run_check=False)
            given = ([source], None) if self.rank < 4 else (None, [target])
            name = str(dtype).removeprefix("torch.")
            with self.assertRaisesRegex(ValueError, f"the source '0' has a pending {op} of {name}, and {why}"):
                torch_overlay.Transfer(*given)
            with self.assertRaisesRegex(ValueError, f"of {dtype} with .* can't change its mesh: {why}"):
                torch_overlay.redistribute([source], other, Shard(0))
            if self.rank < 4 and op != "avg":  # which may end the process
                with self.assertRaises(RuntimeError):
                    source.redistribute(placements=[Replicate()]).to_local()

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

    def test_a_failure_after_the_first_reductions_is_said_to_be_torn(self):
        """What was reduced and sent before is in the targets already, on the rank that fails and on the others."""
        mesh, other = make_root(range(WORLD), (8,), ("dp",)), make_root(range(WORLD), (2, 4), ("ep", "tp"))
        source = DTensor.from_local(torch.ones(64, 128), mesh, [Partial()], run_check=False)
        group = dist.new_group(timeout=timedelta(seconds=1))
        original = Exchanges.run
        for first_to_fail, said in ((0, "no target was written"), (1, "some targets are new and others not")):
            target = distribute_tensor(torch.zeros(64, 128), other, [Replicate(), Shard(0)], src_data_rank=None)
            transfer = torch_overlay.Transfer([source], [target], budget=1 << 15, group=group)
            self.assertTrue(len(transfer._route._phases[None]) > 2)
            calls = itertools.count()

            def fails(self, *given, calls=calls, number=first_to_fail):
                if next(calls) == number:
                    raise ValueError("a fault on this rank")
                return original(self, *given)

            with contextlib.ExitStack() as stack:
                if self.rank == 6:
                    stack.enter_context(mock.patch.object(Exchanges, "run", fails))
                with self.assertRaisesRegex(RuntimeError, f"over ranks 0-7 failed, and {said}"):
                    transfer.run()
            self.assertEqual(bool(target.to_local().any()), first_to_fail > 0)
            dist.barrier()
            transfer.close()
