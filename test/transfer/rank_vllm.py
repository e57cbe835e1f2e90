"""The engine for vLLM, end to end: trainers in one world, workers in another, on vLLM's base classes or stand-ins."""

import importlib
import json
import math
import os
import pathlib
import tempfile
import time
import types
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from mesh_ranks import WORLD
from on_device import DEVICE, from_host
from rank_verify import flip
from torch_overlay.transfers import hosts
from vllm_stand_in import SPARSE, Balanced, Model, Quantized, as_served, installed, slots_as_mapped, update_to_26

ROUNDS = 2


@from_host
def values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vllm_base():
    return importlib.import_module("vllm.distributed.weight_transfer.base")


class Source:
    """Weights on a (2, 2) mesh, FSDP x TP: rows over both, or columns over the second; norms replicated."""

    def __init__(self, shapes):
        self.shapes, self.round, self.fails = shapes, 0, False
        self.mesh = DeviceMesh(DEVICE, torch.arange(4).reshape(2, 2))
        self.metadata = []
        for name, shape in shapes.items():
            _, owners, sizes, placements = self._lies(shape)
            lies = {"owners": owners, "mesh_shape": sizes, "placements": placements}
            self.metadata.append(vllm_base().ParamMeta(name, torch.float32, shape, **lies))

    def _lies(self, shape):
        if len(shape) == 1:
            return [Replicate(), Replicate()], None, None, None
        base, cut = vllm_base(), [Shard(0), Shard(1)] if shape[0] % 3 else [Shard(0), Shard(0)]
        says = tuple(base.Shard(each.dim) if each.is_shard() else base.Replicate() for each in cut)
        return cut, (0, 1, 2, 3), (2, 2), says

    def implements_iter_local(self):
        return True

    def iter_local(self):
        if self.fails:
            raise ArithmeticError("the weights are NaN")
        for number, (name, shape) in enumerate(self.shapes.items()):
            whole = values(shape, 100 * self.round + number)
            yield name, distribute_tensor(whole, self.mesh, self._lies(shape)[0], src_data_rank=None).to_local()


class AsTheyLie(Source):
    """The same weights as DTensors, those with rows over both axes cut by TP first, as FSDP2 x TP cuts them."""

    def __init__(self, shapes):
        self.shapes, self.round, self.fails = shapes, 0, False
        self.mesh = DeviceMesh(DEVICE, torch.arange(4).reshape(2, 2))

    def __call__(self):
        if self.fails:
            raise ArithmeticError("the weights are NaN")
        found = {}
        for number, (name, shape) in enumerate(self.shapes.items()):
            cut = [_StridedShard(0, split_factor=2), Shard(0)] if shape[0] % 4 == 0 else [Shard(0), Shard(1)]
            cut = [Replicate(), Replicate()] if len(shape) == 1 else cut
            whole = values(shape, 100 * self.round + number)
            found[f"model.{name}"] = distribute_tensor(whole, self.mesh, cut, src_data_rank=None)
        return found


class Client:
    """The four calls of vLLM's control plane, by a store that the workers read."""

    def __init__(self, store, workers):
        self.store, self.workers, self.calls, self.is_away, self.forgets = store, workers, 0, False, False
        self.is_active = False

    def _call(self, name, info=None):
        self.store.set(f"call {self.calls}", json.dumps([name, info]))
        said = [self.store.get(f"done {self.calls} {rank}").decode() for rank in range(self.workers)]
        self.calls += 1
        if any(said):
            raise RuntimeError(f"workers failed: {said}")

    def init_weight_transfer_engine(self, info):
        self._call("init", info)

    def start_weight_update(self):
        if self.is_away:
            raise ConnectionError("no route to the server.")
        if self.is_active:  # as vLLM's workers say
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.is_active = True
        self._call("start_weight_update")

    def update_weights(self, info):
        self._call("update_weights", info)

    def finish_weight_update(self):
        self.is_active = False
        self._call("finish_weight_update")
        if self.forgets:
            raise ConnectionError("the server went away")


def serve(engine, store, rank, calls):
    """What a worker does when it is called; what it logs of rounds that were refused."""
    errors = []
    worker = importlib.import_module("torch_overlay.integrations.vllm.worker")
    worker.logger.error = lambda text, *given: errors.append(text % given)
    for number in range(calls):
        name, info = json.loads(store.get(f"call {number}"))
        said = ""
        try:
            if name == "init":
                engine.init_transfer_engine(engine.init_info_cls(**info))
            elif name == "update_weights" and not hasattr(engine, name):
                update_to_26(engine, False)
            else:
                getattr(engine, name)(*() if info is None else (info,))
        except ValueError as error:
            said = str(error)
        store.set(f"done {number} {rank}", said)
        if said and name == "init":
            raise ValueError(said)
    return errors


def place_experts(model):
    """Put each expert where the map says; not here, if that is -1."""
    layer = model.experts0
    load = layer.load

    def by_map(param, loaded, key):
        at = int(layer.expert_map[key[0]])
        if at >= 0:
            load(param, loaded, (at, key[1]))

    layer.w13.weight_loader = layer.w2.weight_loader = by_map


class VllmCases:
    """Cases for ``EightRanks``."""

    def check_weights(self, model, wanted):
        """The parameters are those wanted, bit by bit, and not all zeros."""
        for (name, got), want in zip(model.named_parameters(), wanted.parameters(), strict=True):
            self.assertTrue(torch.equal(got, want) and got.any(), name)

    def _run(
        self,
        quantization,
        reloads,
        fails=None,
        is_away=False,
        version="0.33",
        lies=False,
        moves=False,
        options=None,
        more=lambda engine: None,
        starts=(),
        has_layouts=False,
        **parallel,
    ):
        """Two rounds; the model of a worker, and a second one that its loader filled from the whole weights.

        Before the second round, one in which this trainer fails; or one in which nobody answers the sender, and one
        whose finish fails. After them trainers do `more`, in which there is a round for each of `starts`, which workers
        call with their model before it. No round gathers anything.
        """
        paths = [None] * WORLD
        dist.all_gather_object(paths, tempfile.mktemp())  # a file of another run has answers of its own
        with installed(reloads, version, has_layouts), self.worlds(4, 4) as (world, rank, address):
            from torch_overlay.integrations import vllm as door

            door.register()
            door.register()  # vLLM may load a plugin again
            store = dist.FileStore(paths[0], 8)
            if self.rank == 0:
                # When all have left. FileStore removes it itself, if the last one to leave comes so far.
                self.addCleanup(pathlib.Path(paths[0]).unlink, missing_ok=True)
            store.set_timeout(timedelta(seconds=30))  # where the other side failed
            model = Model(SPARSE, 2, rank % 2).to(torch.bfloat16)
            shapes = {name: shape for name, (shape, _) in model.checkpoint().items()}
            if world == 0:
                source = held = Source(shapes) if not lies else AsTheyLie(shapes)
                if lies:
                    from torch_overlay.integrations.vllm.source import DTensorSource

                    held = DTensorSource(source, names=lambda name: name.removeprefix("model."))
                trainer = importlib.import_module("torch_overlay.integrations.vllm.trainer")
                kind = trainer.TrainerEngine
                if version != "0.24":
                    self.assertIs(kind, self._made("WeightTransferTrainerFactory"))
                info = trainer.TrainerInfo(
                    rank=rank, address=address, trainers=4, workers=4, timeout=20, **options or {}
                )
                client = Client(store, 4)
                engine = kind.trainer_init(info, client=client, source=held)
                for number in range(ROUNDS):
                    source.round = number
                    if number and fails is not None:
                        self._check_a_failure(engine, source, rank == fails)
                    if number and is_away:
                        self._check_nobody_answers(engine, client)
                        self._check_a_finish_that_fails(engine, client)
                    with CommDebugMode() as comms:
                        engine.send_weights()
                    gathers = [op for op in comms.get_comm_counts() if "gather" in str(op)]
                    self.assertTrue(moves or not gathers)  # planning anew gathers what ranks say
                more(engine)
                engine.shutdown()
                return None
            ranks = types.SimpleNamespace(data_parallel_index=rank // 2, world_size=2, rank=rank % 2, **parallel)
            config = types.SimpleNamespace(
                parallel_config=ranks, model_config=types.SimpleNamespace(quantization=quantization)
            )
            about = (ranks, model) if version == "0.24" else (config, torch.device("cpu"), model)
            if has_layouts:
                importlib.import_module("torch_overlay.integrations.vllm.worker").STAGE = 500  # else all come in one
            engine = self._made("WeightTransferEngineFactory")(None, *about)
            if has_layouts:
                as_served(model)
            if moves and rank == 0:
                model.experts0.expert_map = torch.tensor([0, 1, 2])
                place_experts(model)
                maps = iter([[0, 1, 2], [1, 0, -1]])
                engine.start_weight_update = lambda: model.experts0.expert_map.copy_(torch.tensor(next(maps)))
            if starts:
                calls = iter([*[lambda model: None] * ROUNDS, *starts])
                engine.start_weight_update = lambda: next(calls)(model)
            errors = serve(engine, store, rank, 1 + 3 * (ROUNDS + len(starts) + (fails is not None) + is_away))
            found = engine._found
            came = {name: found.target()[name] for name in found.whole}, found, errors
            engine.shutdown()
            wanted = Model(SPARSE, 2, rank % 2).to(torch.bfloat16)
            if moves and rank == 0:
                wanted.experts0.expert_map = torch.tensor([1, 0, -1])
                place_experts(wanted)
                wanted.experts0.w2.data[2] = model.experts0.w2[2]  # expert 2 has gone, and nobody came to its place
                wanted.experts0.w13.data[2] = model.experts0.w13[2]
            last = 100 * (ROUNDS - 1)
            wanted.load_weights([(name, values(shape, last + n)) for n, (name, shape) in enumerate(shapes.items())])
            if has_layouts:
                as_served(wanted)
            return model, wanted, came

    def _check_a_failure(self, engine, source, fails):
        source.fails = fails
        kind, words = (ArithmeticError, "") if fails else (ValueError, "rank 1: ArithmeticError: ")
        with self.assertRaisesRegex(kind, f"{words}the weights are NaN"):
            engine.send_weights()
        source.fails = False

    def _check_nobody_answers(self, engine, client):
        """The other trainers hear of it at once, and not after their timeout, in the words of c10d."""
        begun, client.is_away = time.monotonic(), True
        kind = ConnectionError if self.rank == 0 else RuntimeError
        words = "" if self.rank == 0 else "rank 0 of the trainer, .* ConnectionError: no route to the server. Nothing"
        with self.assertRaisesRegex(kind, words):
            engine.send_weights()
        self.assertLess(time.monotonic() - begun, 10)
        client.is_away = False

    def _check_a_finish_that_fails(self, engine, client):
        """The others would go on to the next round, and wait there for a sender that stopped."""
        client.forgets = True
        kind = ConnectionError if self.rank == 0 else RuntimeError
        words = "" if self.rank == 0 else "rank 0 of the trainer, to finish it .* ConnectionError: the server went away"
        with self.assertRaisesRegex(kind, words):
            engine.send_weights()
        client.forgets = False

    def _made(self, factory):
        import vllm.distributed.weight_transfer.factory as factories

        return getattr(factories, factory)._registry["torch_overlay"]()

    def test_vllm_workers_get_their_parts_in_place(self):
        """Four trainers; two replicas of two tensor-parallel workers. Fused, padded, cast; nothing comes whole."""
        reloads = []
        done = self._run(None, reloads)
        if done is not None:
            model, wanted, (whole, found, _) = done
            self.assertEqual((whole, found.whole, reloads), ({}, {}, []))
            self.check_weights(model, wanted)

    def test_experts_that_moved_on_one_worker_of_vllm_make_all_plan_anew(self):
        """Before the second round, two change places and one goes. Weights would be written over other experts."""
        done = self._run(None, [], moves=True)
        if done is not None:
            model, wanted, (_, found, _) = done
            self.assertEqual(self.rank == 4, "0.down2" in found.skipped)
            self.check_weights(model, wanted)

    def test_vllm_workers_get_only_what_changed(self):
        """Or all of it, if the trainers say so: here, because a server has lost its weights."""

        def more(engine):
            self.assertGreater(engine._transfer.sent_bytes, 0)
            engine.send_weights()
            self.assertEqual(engine._transfer.sent_bytes, 0)
            engine.send_weights(check=True)
            self.assertGreater(engine._transfer.sent_bytes, 0)

        starts = [lambda model: None, lambda model: model.embed.weight.data.zero_()]
        done = self._run(None, [], options={"changes": True}, more=more, starts=starts)
        if done is not None:
            model, wanted, _ = done
            self.check_weights(model, wanted)

    def test_vllm_workers_pass_on_what_they_got(self):
        """Two replicas: the trainers send half as many bytes. If nobody says so, that depends on their hosts."""
        sent = []

        def more(engine):
            sent.append(sum([out for rank, (out, *_) in engine._transfer.traffic.items() if rank < 4]))

        own_host = "trainers" if self.rank < 4 else f"replica {self.rank // 2}"
        for relay, host in ((False, own_host), (None, "one"), (True, "one"), (None, own_host)):
            with mock.patch.dict(os.environ, NCCL_HOSTID=host), mock.patch.object(hosts, "LEAST", 0):
                done = self._run(None, [], options={} if relay is None else {"relay": relay}, more=more)
            if done is not None:
                model, wanted, _ = done
                self.check_weights(model, wanted)
        if sent:
            self.assertEqual(sent[1], sent[0])
            self.assertLess(max(sent[2:]), 0.6 * sent[0])  # norms and shared heads go to all four workers

    def _check_verify(self, quantization, flips, words, **options):
        """After the rounds all is right; then rank 6 flips a bit, which is found twice; then a round mends it."""
        flips_one = lambda model: flip(flips(model), 5, 0) if self.rank == 6 else None
        calls = [None, flips_one, None, None, None]

        def more(engine):
            self.assertEqual(engine.verify(), {})
            for _ in range(2):  # nothing is mended in silence
                with self.assertRaisesRegex(ValueError, words):
                    engine.verify()
            engine.send_weights(check=True)
            self.assertEqual(engine.verify(), {})

        starts = [call or (lambda model: None) for call in calls]
        done = self._run(quantization, [], more=more, starts=starts, options=options)
        if done is not None:
            model, wanted, (_, _, errors) = done
            self.check_weights(model, wanted)
            self.assertEqual(len(errors), 2)
            for error in errors:
                self.assertRegex(error, f"A verification of weights failed: .*{words}")

    def test_a_bit_that_flipped_in_a_model_of_vllm_is_found(self):
        box = r"its box of shape \(3, 8\) that starts at \(0, 0\)"
        words = rf"the target '1.down2' of rank 6 differs from the source of rank . in {box}.*rank 6 .* worker 2\.\)"
        self._check_verify(None, lambda model: model.experts1.w2.data[2], words)

    def test_a_bit_that_flipped_in_a_model_of_vllm_is_found_where_only_changes_come(self):
        words = "the target 'head' of rank 6 differs from the source of rank 0"
        self._check_verify(None, lambda model: model.head.weight.data, words, changes=True, relay=True)

    def test_a_bit_that_flipped_in_what_vllm_made_of_whole_tensors_is_found(self):
        """All of a quantized model goes through vLLM's own step, which is done again."""
        words = r"'qkv1.weight' of rank 6 differs in 1 of 144 elements of shape \(12, 12\), the first at \(0, 5\)"
        self._check_verify("fp8", lambda model: model.qkv1.weight.data, words)

    def test_padding_of_vllm_that_somebody_wrote_is_found(self):
        words = "'embed.weight' of rank 7 differs in 1 elements from 0, to which its loader sets them"
        starts = [lambda model: model.embed.weight.data[-1, 3].fill_(1) if self.rank == 7 else None]

        def more(engine):
            with self.assertRaisesRegex(ValueError, words):
                engine.verify()

        self._run(None, [], more=more, starts=starts)

    def test_a_trainer_of_vllm_that_sends_while_others_verify_is_told(self):
        """Or workers. All ranks raise at once, and go on."""
        words = "rank.*: verifies.*runs with check=False|runs with check=False.*verifies"

        def more(engine):
            begun, update = time.monotonic(), engine.client.update_weights
            with self.assertRaisesRegex(ValueError, words):
                engine.verify() if self.rank % 3 == 0 else engine.send_weights()
            for info, call in (({}, engine.verify), ({"verify": True}, engine.send_weights)):
                engine.client.update_weights = lambda _, info=info: update(info)
                with self.assertRaisesRegex(ValueError, words):
                    call()
            engine.client.update_weights = update
            self.assertLess(time.monotonic() - begun, 15)
            engine.send_weights()
            engine.verify()

        done = self._run(None, [], more=more, starts=[lambda model: None] * 5)
        if done is not None:
            self.check_weights(*done[:2])
            self.assertEqual(len(done[2][2]), 3)

    def test_trainers_of_vllm_that_give_other_options_are_told(self):
        with self.assertRaisesRegex((ValueError, RuntimeError), "changes=True"):
            self._run(None, [], options={"changes": self.rank == 1})

    def test_experts_that_vllm_moves_get_what_its_map_says(self):
        """Four workers have eight slots for four experts. Between rounds all slots change; in the third round one
        worker says that experts are being moved, while others have landed elsewhere: all refuse it, and nobody waits.
        """
        maps = [[0, 1, 2, 3, 0, 1, 2, 3]] * 2, [[3, 1, 0, 0, 2, 1, 1, 2], [0, 0, 0, 0, 3, 2, 1, 1]]
        maps += ([[1, 2, 0, 3, 0, 0, 0, 0], [3, 2, 1, 0, 1, 1, 3, 3]],)
        paths = [None] * WORLD
        dist.all_gather_object(paths, tempfile.mktemp())
        with installed([]), self.worlds(4, 4) as (world, rank, address):
            from torch_overlay.integrations import vllm as door

            door.register()
            store = dist.FileStore(paths[0], 8)
            store.set_timeout(timedelta(seconds=30))
            model = Balanced(4, rank)
            model.balance()
            shapes = {name: shape for name, (shape, _) in model.checkpoint().items()}
            if world == 0:
                trainer = importlib.import_module("torch_overlay.integrations.vllm.trainer")
                source = Source(shapes)
                info = trainer.TrainerInfo(rank=rank, address=address, trainers=4, workers=4, timeout=20)
                engine = trainer.TrainerEngine.trainer_init(info, client=Client(store, 4), source=source)
                for source.round in range(2):
                    engine.send_weights()
                source.round, begun = 2, time.monotonic()
                with self.assertRaisesRegex(ValueError, "rank 6: vLLM is moving experts.*rank 6 of .* worker 2"):
                    engine.send_weights()
                self.assertLess(time.monotonic() - begun, 10)
                engine.send_weights()
                engine.shutdown()
                return
            ranks = types.SimpleNamespace(data_parallel_index=0, world_size=4, rank=rank, enable_eplb=True)
            config = types.SimpleNamespace(parallel_config=ranks, model_config=types.SimpleNamespace(quantization=None))
            engine = self._made("WeightTransferEngineFactory")(None, config, torch.device("cpu"), model)
            starts = iter([(maps[0], False), (maps[1], False), (maps[2], True), (maps[2], False)])

            def start():
                rows, moves = next(starts)
                model.state.rebalanced = moves and rank == 2
                if not model.state.rebalanced:
                    model.rebalance(rows)

            engine.start_weight_update = start
            finished = []
            engine.finish_weight_update = lambda: finished.append(
                [(got.clone(), want) for got, want in slots_as_mapped(model, whole(len(finished)), rank, 2)]
            )

            def whole(turn):
                seed = 100 * (0, 1, 1, 2)[turn]
                return {name: values(shape, seed + at) for at, (name, shape) in enumerate(shapes.items())}

            errors = serve(engine, store, rank, 1 + 3 * 4)
            engine.shutdown()
            self.assertEqual(len(errors), 1)
            for turn, slots in enumerate(finished):
                moved = turn == 2 and rank != 2  # its map is the next one, and its weights are the former
                self.assertEqual(all(torch.equal(got, want) for got, want in slots), not moved, turn)

    def _check_as_they_lie(self, version):
        done = self._run(None, [], version=version, lies=True)
        if done is not None:
            model, wanted, (whole, found, _) = done
            self.assertEqual((whole, found.whole), ({}, {}))
            self.check_weights(model, wanted)

    def test_strided_shards_go_to_vllm_as_they_lie(self):
        self._check_as_they_lie("0.33")

    def test_strided_shards_go_to_vllm_0_27(self):
        self._check_as_they_lie("0.27")

    def test_strided_shards_go_to_vllm_0_24(self):
        self._check_as_they_lie("0.24")

    def test_a_quantized_model_of_vllm_gets_all_whole(self):
        reloads = []
        done = self._run("fp8", reloads)
        if done is not None:
            model, wanted, (whole, found, _) = done
            self.assertEqual(reloads, ["begun", "done"] * ROUNDS)
            self.assertEqual((len(found.direct), len(whole)), (0, len(model.checkpoint())))
            self.check_weights(model, wanted)

    def test_a_quantized_model_of_vllm_gets_slices(self):
        """Layer by layer in the loader's layout. Each worker makes what it serves, and verifies by making it again."""
        reloads = []
        flips = lambda model: flip(model.qkv1.weight.data, 5, 0) if self.rank == 6 else None
        words = r"'qkv1.weight' of rank 6 differs in 1 of 144 elements of shape \(12, 12\), the first at \(0, 5\)"

        def breaks(model):
            Quantized.fails = self.rank == 5

        def mends(model):
            Quantized.fails = False

        def more(engine):
            self.assertEqual(engine.verify(), {})
            with self.assertRaisesRegex(ValueError, words):
                engine.verify()
            with self.assertRaisesRegex(ValueError, "rank 5: .*raised ArithmeticError: no scale fits.*worker 1"):
                engine.send_weights()
            self.assertTrue(engine._transfer.sent_bytes == 0)  # it came, and only a step failed
            engine.send_weights()
            self.assertTrue(engine._transfer.sent_bytes == 0)
            self.assertEqual(engine.verify(), {})
            self.assertTrue(engine._transfer.sent_bytes > 0)
            into = [engine._transfer.traffic[rank][1] for rank in range(4, 8)]
            whole = sum(2 * math.prod(shape) for shape, _ in Model(SPARSE, 2, 0).checkpoint().values())
            self.assertTrue(max(into) < 0.6 * whole, (into, whole))

        done = self._run(
            "fp8",
            reloads,
            more=more,
            starts=[lambda m: None, flips, breaks, mends, lambda m: None],
            has_layouts=True,
            options={"changes": True},
        )
        if done is not None:
            model, wanted, (whole, found, errors) = done
            self.assertEqual((reloads, whole), ([], {}))
            self.assertEqual(len(errors), 2)
            self.assertEqual({name for name in found.direct if name not in found.staged}, {"0.norm", "1.norm"})
            self.check_weights(model, wanted)
            self.assertEqual(model.qkv1.weight.dtype, torch.int8)

    def test_a_trainer_that_fails_is_named_to_all_and_the_next_round_is_as_any(self):
        done = self._run(None, [], fails=1)
        if done is not None:
            model, wanted, (_, _, (error,)) = done
            self.assertIn("refused, and the server keeps those that it has: A Transfer over", error)
            self.assertIn("nothing was sent: rank 1: ArithmeticError: the weights are NaN", error)
            self.check_weights(model, wanted)

    def test_a_sender_of_vllm_whom_no_server_answers_tells_the_other_trainers(self):
        done = self._run(None, [], is_away=True)
        if done is not None:
            model, wanted, _ = done
            self.check_weights(model, wanted)

    def test_a_refused_round_of_vllm_begins_no_reload(self):
        """In which the model is on meta: the server would have no weights until a later round succeeds."""
        reloads = []
        done = self._run("fp8", reloads, fails=1)
        if done is not None:
            self.assertEqual(reloads, ["begun", "done"] * ROUNDS)

    def test_a_worker_of_vllm_that_refuses_tells_all(self):
        """Not after the timeout. These servers say that they move experts, and nothing says where they are."""
        begun = time.monotonic()
        words = r"needs vLLM's state of experts that move \(enable_eplb\) .*, and 0 of them are of this model"
        with self.assertRaisesRegex((ValueError, RuntimeError), words):
            self._run(None, [], enable_eplb=True)
        self.assertLess(time.monotonic() - begun, 15)

    def test_vllm_engines_say_what_they_need(self):
        with installed([]):
            from torch_overlay.integrations.vllm.trainer import TrainerEngine, TrainerInfo
            from torch_overlay.integrations.vllm.worker import InitInfo, WorkerEngine, lays_out_anew

            with self.assertRaisesRegex(ValueError, "rank from 0 to 1 and sends to workers; got rank 2 of 2 and 4"):
                TrainerInfo(rank=2, address="tcp://localhost:1", trainers=2, workers=4)
            info = TrainerInfo(rank=0, address="tcp://localhost:1", trainers=1, workers=1)
            with self.assertRaisesRegex(ValueError, "needs a source of what each rank holds"):
                TrainerEngine.trainer_init(info, client=None)
            with self.assertRaisesRegex(ValueError, "'w' is of type 'float33', which is no type of torch's"):
                InitInfo("tcp://localhost:1", 1, 1, 1.0, 1, [("w", "float33", (2,))]).metas
            config = types.SimpleNamespace(parallel_config=None, model_config=None)
            engine = WorkerEngine(None, config, torch.device("cpu"), torch.nn.Module())
            with self.assertRaisesRegex(RuntimeError, "isn't initialized: init_transfer_engine comes first"):
                engine.receive_weights(engine.update_info_cls())
            module, kind = torch.nn.Module(), type("UnquantizedFusedMoEMethod", (), {})
            self.assertFalse(lays_out_anew(module))
            module.quant_method = kind()
            for backend, anew in (("TRITON", False), ("FLASHINFER_TRTLLM", True)):
                module.quant_method.unquantized_backend = types.SimpleNamespace(name=backend)
                self.assertEqual(lays_out_anew(module), anew)
            module.quant_method = type("Fp8LinearMethod", (), {})()
            self.assertTrue(lays_out_anew(module))
            module.quant_method, module.process_weights_after_loading = None, lambda: None
            self.assertTrue(lays_out_anew(module))
