"""vLLM's door in one process, on stand-ins: what is registered with which vLLM; what a worker refuses or survives."""

import contextlib
import importlib
import logging
import types

import pytest
import torch

import forks
from vllm_stand_in import SPARSE, Model, installed
from way import needs_package

pytestmark = needs_package
SIDES = {"worker": "WeightTransferEngineFactory", "trainer": "WeightTransferTrainerFactory"}
# What vLLM has from this version on: the factories in which the engine is registered, and the sides that can use it.
VLLMS = {"0.33": (SIDES, SIDES), "0.27": (SIDES, ["worker"]), "0.20": (["worker"], []), None: ([], [])}


@pytest.mark.parametrize("version", VLLMS)
def test_the_plugin_breaks_no_vllm_and_says_which_one_it_needs(version, caplog):
    """vLLM calls it without a guard in each process, whether or not somebody asks for the engine."""
    registered, usable = VLLMS[version]
    with installed([], version), caplog.at_level(logging.INFO, "torch_overlay"):
        from torch_overlay.integrations import vllm as door

        importlib.reload(door).register()
        door.register()
        assert len(caplog.records) == (0 if len(registered) == 2 else 2)  # a line each time
        for record in caplog.records:
            assert "a trainer needs vLLM 0.33 or newer" in record.getMessage()
        for side, factory in SIDES.items():
            if side in registered:
                factories = importlib.import_module("vllm.distributed.weight_transfer.factory")
                asked = getattr(factories, factory)._registry["torch_overlay"]
            else:
                asked = lambda side=side: importlib.import_module(f"torch_overlay.integrations.vllm.{side}")
            needs = f"can't be used here: a {side} needs vLLM 0.[23][37] or newer, and "
            with contextlib.nullcontext() if side in usable else pytest.raises(ImportError, match=needs):
                asked()


def worker(model, **parallel):
    """A worker's engine, and what its init is told if no trainer comes."""
    from torch_overlay.integrations.vllm.worker import InitInfo, WorkerEngine

    ranks = types.SimpleNamespace(data_parallel_index=0, world_size=1, rank=0, **parallel)
    config = types.SimpleNamespace(parallel_config=ranks, model_config=types.SimpleNamespace(quantization=None))
    params = [(name, "float32", shape) for name, (shape, _) in model.checkpoint().items()]
    at = f"tcp://127.0.0.1:{forks.free_port()}"
    return WorkerEngine(None, config, torch.device("cpu"), model), InitInfo(at, 0, 1, 20.0, 1 << 20, params)


def test_a_server_that_moves_experts_is_refused():
    """Landings are asked once: after a move they would be other experts'."""
    with installed([]):
        engine, info = worker(Model(SPARSE, 1, 0), enable_eplb=True)
        with pytest.raises(ValueError, match="needs experts that stay on their workers, and this server has enable_e"):
            engine.init_transfer_engine(info)


class Counts(Model):
    """Refuses what is no part of it, and to be given less than all, as models with a draft head do."""

    def load_weights(self, weights):
        came = 0
        for pair in weights:
            super().load_weights([pair])
            came += 1
        if came < self.needs:
            raise ValueError(f"{self.needs - came} tensors are missing")


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_loader_that_counts_is_asked_with_all_names(lacks):
    with installed([]):
        model = Counts(SPARSE, 1, 0)
        info = worker(model)[1]
        model.needs = len(info.params) + lacks
        from torch_overlay.integrations.vllm.landings import landings, refusal

        metas = info.metas
        found = landings(model.load_weights, model, metas)
        assert not found.direct
        refused = refusal(model.load_weights, model, metas, found)
        assert (refused is None) == (not lacks) and not any(param.any() for param in model.parameters())


@pytest.mark.parametrize("name", ["0.rotary", "unknown"])
def test_a_name_that_the_loader_does_not_know_ends_init(name):
    """And no round, which it would in the middle, with the model on meta."""
    with installed([]):
        engine, info = worker(Model(SPARSE, 1, 0))
        info.params.insert(3, (name, "float32", (2,)))
        with pytest.raises(ValueError, match=f"and that of Model refuses '{name}', with AttributeError: .* Leave out"):
            engine.init_transfer_engine(info)


def test_a_loader_that_looks_at_values_is_asked_in_a_round():
    """Nothing can be said before: the probe has no values."""
    with installed([]):
        from torch_overlay.integrations.vllm.landings import Meta, landings, refusal

        model = Model(SPARSE, 1, 0)
        for looks in (lambda w: bool(w.isnan().any()), lambda w: w.numpy(), lambda w: w.tolist(), lambda w: w[w > 0]):

            def load(weights, looks=looks):
                for _, weight in weights:
                    looks(weight)

            metas = [Meta("w", torch.float32, (2, 2))]
            found = landings(load, model, metas)
            assert set(found.whole) == {"w"} and refusal(load, model, metas, found) is None


@pytest.mark.parametrize("fails", ["run", "load", None])
def test_a_round_that_fails_leaves_no_reload_open(fails):
    """vLLM's reload has the model on meta until it is finished: the server would have no weights."""
    reloads = []
    with installed(reloads):
        model = Model(SPARSE, 1, 0)
        engine = worker(model)[0]

        def run():
            reloads.append("run")
            if fails == "run":
                raise RuntimeError("run")

        def load(weights):
            reloads.append("load")
            if fails == "load":
                raise RuntimeError("load")

        engine._transfer, engine._whole = types.SimpleNamespace(run=run, close=lambda: None), {"w": torch.zeros(1)}
        model.load_weights = load
        for _ in range(2):
            engine.start_weight_update()
            with contextlib.nullcontext() if fails is None else pytest.raises(RuntimeError, match=fails):
                engine.receive_weights(engine.update_info_cls())
            if fails is None:
                engine.finish_weight_update()
        assert reloads == (["run"] if fails == "run" else ["run", "begun", "load", "done"]) * 2
