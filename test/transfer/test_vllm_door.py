"""vLLM's door in one process, on stand-ins: what is registered with which vLLM; what a worker refuses or survives."""

import contextlib
import http.server
import importlib
import json
import logging
import re
import threading
import types
from unittest import mock

import pytest
import torch

import forks
import torch_overlay
from torch_overlay.errors import TransferFailed
from vllm_stand_in import (
    EPLB,
    HAS_VLLM,
    SPARSE,
    Balanced,
    Model,
    RoutedExperts,
    installed,
    slots_as_mapped,
    update_to_26,
)
from way import needs_package

pytestmark = needs_package
SIDES = {"worker": "WeightTransferEngineFactory", "trainer": "WeightTransferTrainerFactory"}
# By version: the factories in which the engine is registered, whether a worker can use it, and what the log says.
VLLMS = {
    "0.33": (SIDES, True, None),
    "0.27": (SIDES, True, None),
    "0.24": (["worker"], True, "has no factory for trainers: call .*trainer.TrainerEngine.trainer_init"),
    "0.20": (["worker"], False, "has no factory for trainers"),
    None: ([], False, "a worker needs vLLM 0.24 or newer, and none is installed"),
}


@pytest.mark.parametrize("version", VLLMS)
def test_the_plugin_breaks_no_vllm_and_says_which_one_it_needs(version, caplog):
    """vLLM calls it without a guard in each process, whether or not somebody asks for the engine."""
    registered, works, said = VLLMS[version]
    with installed([], version), caplog.at_level(logging.INFO, "torch_overlay"):
        from torch_overlay.integrations import vllm as door

        importlib.reload(door).register()
        door.register()
        assert len(caplog.records) == (0 if said is None else 2)  # a line each time
        assert all(re.search(said, record.getMessage()) for record in caplog.records)
        for side, factory in SIDES.items():
            if side in registered:
                factories = importlib.import_module("vllm.distributed.weight_transfer.factory")
                asked = getattr(factories, factory)._registry["torch_overlay"]
            else:
                asked = lambda side=side: importlib.import_module(f"torch_overlay.integrations.vllm.{side}")
            needs = "can't be used here: a worker needs vLLM 0.24 or newer, and "
            fails = side == "worker" and not works
            with pytest.raises(ImportError, match=needs) if fails else contextlib.nullcontext():
                asked()


def worker(model, quant_config=None, is_old=False, **parallel):
    """A worker's engine, and what its init is told if no trainer comes. An old vLLM, up to 0.26, gives it less."""
    from torch_overlay.integrations.vllm.worker import WorkerEngine

    ranks = types.SimpleNamespace(data_parallel_index=0, world_size=1, rank=0, **parallel)
    config = types.SimpleNamespace(
        parallel_config=ranks, model_config=types.SimpleNamespace(quantization=None), quant_config=quant_config
    )
    about = (ranks, model) if is_old else (config, torch.device("cpu"), model)
    return WorkerEngine(None, *about), worker_info(model)


def worker_info(model):
    from torch_overlay.integrations.vllm.worker import InitInfo

    params = [(name, "float32", shape) for name, (shape, _) in model.checkpoint().items()]
    return InitInfo(f"tcp://127.0.0.1:{forks.free_port()}", 0, 1, 20.0, 1 << 20, params)


MOVES = [[3, 1, 0, 0, 2, 1, 1, 2], [0, 0, 0, 0, 3, 2, 1, 1]]  # by layer and slot, the expert


@contextlib.contextmanager
def balanced_worker(ep=2, rank=1, **parallel):
    with installed([]):
        model = Balanced(ep, rank)
        model.balance()
        yield model, *worker(model, enable_eplb=True, **parallel)


def test_experts_that_vllm_moved_are_written_where_its_map_says():
    """Two of one worker's slots may have the same expert. vLLM's own loader goes by the first map."""
    with balanced_worker() as (model, engine, info):
        engine._metas = info.metas
        engine._ask_loader()
        for number, rows in enumerate([[model.first] * 2, MOVES]):
            if number:
                assert engine._found.stale() is None
                model.rebalance(rows)
                assert engine._found.stale() == "what they depend on has changed"
                engine._ask_loader()
            found = engine._found
            assert not found.whole and not found.untouched
            weights = {meta.name: torch.randn(meta.shape) for meta in info.metas}
            for name, pieces in found.direct.items():
                for piece in pieces:
                    box = [slice(at, at + many) for at, many in zip(piece.start, piece._local_tensor.shape)]
                    piece._local_tensor.copy_(weights[name][tuple(box)])
            for got, want in slots_as_mapped(model, weights, 1, 4):
                assert torch.equal(got, want)
            engine._load([*weights.items()])  # as what comes whole is loaded
            for got, want in slots_as_mapped(model, weights, 1, 4):
                assert torch.equal(got, want)
            model.load_weights(weights.items())
            wrong = sum([not torch.equal(got, want) for got, want in slots_as_mapped(model, weights, 1, 4)])
            assert wrong == (14 if number else 0)


def changes_state(model, engine):
    model.state.physical_to_logical_map[1, 0] = 2  # tokens go by another map


def lacks_an_expert(model, engine):
    model.rebalance([[0, 1, 2, 2, 2, 2, 2, 2]] * 2)


def has_other_names(model, engine):
    engine._expert_states = [types.SimpleNamespace(model=model, physical_to_logical_map=torch.tensor(MOVES))]
    model.rebalance(MOVES)


def has_another_order(model, engine):
    model.moe_layers[1].routed_experts.expert_map_manager.expert_map = torch.tensor([-1, 0, -1, 1, -1, 2, -1, 3])


def loads_past_the_loader(model, engine):
    load = model.load_weights

    def load_weights(weights):
        for name, loaded in weights:
            layer, _, expert, key = name.split(".") if "." in name else [""] * 4
            if layer == "1" and key == "w2":  # this worker has the copies
                model.moe_layers[1].routed_experts.w2_weight.data[int(expert)].copy_(loaded)
            else:
                load([(name, loaded)])

    model.load_weights = load_weights


def moves_other_memory(model, engine):
    model.expert_weights[0][1] = torch.zeros(4, 12)


def gets_fewer(model, engine):
    engine._metas = [meta for meta in engine._metas if meta.name != "0.experts.1.w3"]


def computes(model, engine):
    load = model.load_weights
    model.load_weights = lambda weights: load([(name, w * 2 if name[0] == "1" else w) for name, w in weights])


def starts_first(model, engine):
    engine.parallel_config.enable_elastic_ep = True


def is_quantized(model, engine):
    engine.model_config.quantization = "fp8"


UNKNOWN = {
    changes_state: "tokens are routed by another map",
    lacks_an_expert: "map doesn't say where each of 4 experts is",
    has_other_names: "vLLM 0.24 to 0.33: AttributeError: .* no attribute 'rebalanced'",
    has_another_order: r"slots of this worker aren't consecutive: \[-1, 0, -1",
    loads_past_the_loader: r"loader of Balanced writes moe_layers.1.routed_experts.w2_weight without",
    moves_other_memory: "isn't the memory of the model's parameters",
    gets_fewer: r"needs all experts .* slots of moe_layers.0.routed_experts.w13_weight get 12 to 24 elements",
    computes: "straight into the model, and moe_layers.1.* can't be written so: its loader calls aten.mul",
    starts_first: "this server has enable_elastic_ep",
    is_quantized: "can't be written so: the model is quantized. Start the server without enable_eplb",
}


@pytest.mark.parametrize("differs", UNKNOWN)
def test_experts_that_move_otherwise_than_known_are_refused(differs):
    """A wrong expert is silent."""
    with balanced_worker() as (model, engine, info):
        engine._metas = info.metas
        differs(model, engine)
        with pytest.raises(ValueError, match=UNKNOWN[differs]):
            engine._ask_loader()


def test_nothing_comes_while_vllm_is_moving_experts():
    """It has copied some to a buffer, and would write them over those that came."""
    with balanced_worker(1, 0) as (model, engine, info):
        with by_hand(engine, info) as done:
            engine.receive_weights(engine.update_info_cls())
            for state in ({"rebalanced": True}, {"pending_result": object()}):
                before = dict(vars(model.state))
                vars(model.state).update(state)
                engine.receive_weights(engine.update_info_cls())
                assert re.search(r"refuse: vLLM is moving experts \(EPLB\), .* and send again", done.pop())
                vars(model.state).update(before)
            engine.receive_weights(engine.update_info_cls())
            assert done == ["plan", "run", "run"]


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM isn't installed; nox -s vllm runs it")
def test_the_stand_ins_of_moving_experts_are_as_vllms():
    import dataclasses
    import inspect

    import vllm.distributed.eplb.eplb_state as its
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as Its

    for name, kind in EPLB.items():
        if dataclasses.is_dataclass(kind):
            theirs = {field.name for field in dataclasses.fields(getattr(its, name))}
            assert {field.name for field in dataclasses.fields(kind)} <= theirs
    ours, theirs = (inspect.signature(each.weight_loader) for each in (RoutedExperts, Its))
    assert [*ours.parameters] == [*theirs.parameters]
    first = "build_initial_global_physical_to_logical_map"
    assert getattr(EPLB["EplbState"], first)(4, 6) == getattr(its.EplbState, first)(4, 6)


@pytest.mark.parametrize("name", ["0.rotary", "unknown"])
def test_a_name_that_the_loader_does_not_know_ends_init(name):
    """And no round, which it would in the middle, with the model on meta."""
    with installed([]):
        engine, info = worker(Model(SPARSE, 1, 0))
        info.params.insert(3, (name, "float32", (2,)))
        with pytest.raises(ValueError, match=f"and that of Model refuses '{name}', with AttributeError: .* Leave out"):
            engine.init_transfer_engine(info)


class Scaled(torch.nn.Module):
    """Two layers: what comes for the first is cut, and for the second computed with."""

    def __init__(self):
        super().__init__()
        self.cut, self.scaled = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))

    def checkpoint(self):
        return dict.fromkeys(("cut", "scaled"), ((2, 2), False))

    def load_weights(self, weights):
        for name, weight in weights:
            self.loads.append(name)
            if self.fails == "load":
                raise RuntimeError("load")
            getattr(self, name).weight.data.copy_(weight * 2 if name == "scaled" else weight)

    loads: list = []
    fails = None


def planned(engine, info, changes=False):
    """An engine whose rounds are run by hand: what a transfer writes, and what it does besides."""
    done = []

    class Transfer:
        left_out, staged = {"source": (), "target": ()}, ()

        def __init__(self, source, target, **_):
            done.append("plan")
            self.target = target

        def run(self, check):
            done.append("run")
            for value, (_, tensor) in enumerate(sorted(self.target.items()), 1):
                for local in [p._local_tensor for p in tensor] if isinstance(tensor, tuple) else [tensor]:
                    local.fill_(value)

        def verify(self):
            done.append("verify")

        def bind(self, target):
            done.append("bind")
            self.target = target

        def refuse(self, why):
            done.append(f"refuse: {why}")
            return why

        close = lambda self: done.append("close")

    engine._metas, engine._options = info.metas, {"budget": 1, "changes": changes}
    with mock.patch.object(torch_overlay, "Transfer", Transfer):
        engine._ask_loader()
        engine._plan()
        yield done


by_hand = contextlib.contextmanager(planned)


@pytest.mark.parametrize("relay", [True, False, None, "nothing"])
def test_a_worker_takes_what_any_trainer_says_of_relay(relay):
    """In JSON, as HTTP brings it. Older trainers say nothing of it."""
    with installed([]):
        from torch_overlay.integrations.vllm.worker import InitInfo, options_of

        said = {"address": "tcp://localhost:1", "trainers": 1, "workers": 1, "timeout": 1.0, "budget": 1}
        said |= {} if relay == "nothing" else {"relay": relay}
        options = options_of(InitInfo(**json.loads(json.dumps(said))))
        assert options == {"budget": 1, "changes": False, "relay": None if relay == "nothing" else relay}


@pytest.mark.parametrize("laid_out", [True, False])
@pytest.mark.parametrize("fails", ["run", "load", None])
def test_a_round_reloads_what_comes_whole_and_leaves_no_reload_open(fails, laid_out):
    """vLLM's reload has these modules on meta until it is finished: the server would have no weights. A module that
    vLLM leaves as it is isn't reloaded: a loader that writes past `weight_loader`, as GPT-OSS's, would be lost."""
    reloads = []
    with installed(reloads):
        model = Scaled()
        if laid_out:
            model.scaled.process_weights_after_loading = lambda dtype: None
        engine, info = worker(model)
        with by_hand(engine, info) as done:
            if fails == "run":
                engine._transfer.run = mock.Mock(side_effect=RuntimeError("run"))
            model.fails, model.loads = fails, []
            for _ in range(2):
                engine.start_weight_update()
                with contextlib.nullcontext() if fails is None else pytest.raises(RuntimeError, match=fails):
                    engine.receive_weights(engine.update_info_cls())
                engine.finish_weight_update()
            assert reloads == ([] if fails == "run" else ["begun", "done"] * 2)
            assert model.loads == ([] if fails == "run" else ["scaled"] * 2)
            assert [*engine._modules_to_reload().modules()] == ([model.scaled] if laid_out else [])
            if fails is None:
                assert done == ["plan", "run", "run"]
                assert (model.cut.weight == 1).all() and (model.scaled.weight == 4).all()


def test_what_came_whole_is_kept_for_a_round_that_brings_only_changes():
    """A loader may change what it gets, here without a version counter that would tell."""
    with installed([]):
        model = Scaled()
        engine, info = worker(model)
        model.load_weights = lambda weights: [getattr(model, n).weight.data.copy_(w.data.mul_(2)) for n, w in weights]
        with by_hand(engine, info, changes=True) as done:
            for came in (True, False):
                if not came:  # nothing has changed
                    engine._transfer.run = lambda check: done.append("run")
                engine.receive_weights(engine.update_info_cls())
                assert (model.scaled.weight == 4).all()
            assert done == ["plan", "run", "run"]


def test_memory_that_moved_is_bound_anew_and_boxes_that_changed_are_planned_anew():
    """Written where they were, weights would be lost, or be other experts'."""
    with installed([]):
        model = Model(SPARSE, 1, 0)
        engine, info = worker(model)
        with by_hand(engine, info) as done:
            engine.receive_weights(engine.update_info_cls())
            model.embed.weight.data = torch.zeros_like(model.embed.weight)
            engine.receive_weights(engine.update_info_cls())
            assert done == ["plan", "run", "bind", "run"] and model.embed.weight.any()
            del done[:]
            model.experts0.expert_map = torch.tensor([2, 1, 0])
            load = model.experts0.load
            turned = lambda param, w, key: load(param, w, (int(model.experts0.expert_map[key[0]]), key[1]))
            model.experts0.w13.weight_loader = model.experts0.w2.weight_loader = turned
            engine.receive_weights(engine.update_info_cls())
            assert done == ["bind", "run"]  # the same boxes of other tensors' memory
            names = sorted(engine._found.target())
            for expert in range(3):
                value = names.index(f"0.down{expert}") + 1
                assert (model.experts0.w2[2 - expert] == value).all()
            del done[:]
            model.experts0.expert_map[0] = -1
            gone = lambda param, w, key: turned(param, w, key) if model.experts0.expert_map[key[0]] >= 0 else None
            model.experts0.w13.weight_loader = model.experts0.w2.weight_loader = gone
            engine.receive_weights(engine.update_info_cls())
            moved = "refuse: its landings have changed: what they depend on has changed"
            assert done == [moved, "plan", "close", "run"]


def test_an_update_of_vllm_0_24_in_the_checkpoints_format_is_refused_and_the_model_put_back():
    """There the whole model is on meta, and stays there after a failure."""
    reloads = []
    with installed(reloads, "0.24"):
        from torch_overlay.integrations.vllm.worker import WorkerEngine

        model = Scaled()
        info = worker_info(model)
        engine = WorkerEngine(None, types.SimpleNamespace(data_parallel_index=0, world_size=1, rank=0), model)
        with by_hand(engine, info) as done:
            words = r"with start_weight_update\(is_checkpoint_format=False\)"
            with pytest.raises(ValueError, match=words):
                update_to_26(engine, True)
            assert reloads == ["begun", "done"] and re.search(f"^refuse: .*{words}", done.pop())
            update_to_26(engine, False)
            assert reloads[2:] == ["begun", "done"] and done == ["plan", "run"]
            assert (model.cut.weight == 1).all() and (model.scaled.weight == 4).all()
        with pytest.raises(NotImplementedError, match=r"sends by torch_overlay.*TrainerEngine"):
            WorkerEngine.trainer_send_weights(iter(()), {})


def test_a_vllm_with_other_factories_goes_on_without_the_engine(caplog):
    """vLLM calls plugins without a guard, in processes of people who never ask for this engine."""
    with installed([]):
        from torch_overlay.integrations import vllm as door

        factories = importlib.import_module("vllm.distributed.weight_transfer.factory")
        with mock.patch.object(factories, "WeightTransferEngineFactory", object()):
            door.register()
    assert "the engine 'torch_overlay' is not registered" in caplog.text and "_registry" in caplog.text


@pytest.mark.parametrize("version", ["0.24", "0.33"])
@pytest.mark.parametrize("sends", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("scale", ["", "w_scale_inv"])
def test_an_fp8_checkpoint_gets_no_weights_without_scales(sends, scale, version):
    """The loader would cast them, and go on with the scales of other weights. vLLM 0.24 gives an engine no config."""
    with installed([], version):
        model, config = Scaled(), types.SimpleNamespace(is_checkpoint_fp8_serialized=True)
        if version == "0.24":
            model.cut.quant_method = types.SimpleNamespace(quant_config=config)
        engine, info = worker(model, quant_config=config, is_old=version == "0.24")
        assert version == "0.33" or engine.model_config.quantization  # so that all comes whole
        fits = sends != "bfloat16" and scale
        for scale_type in ("float32", "float8_e8m0fnu"):
            info.params = [("w", sends, (2, 2))] + ([(scale, scale_type, (1,))] if scale else [])
            engine._metas = info.metas
            with (
                contextlib.nullcontext()
                if fits
                else pytest.raises(ValueError, match=r"with their scales.* 'w' without")
            ):
                engine._check_scales()
        engine._metas = []
        with pytest.raises(ValueError, match=r"with their scales.* the trainer sends nothing\."):
            engine._check_scales()


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, TransferFailed, KeyError])
def test_an_error_that_names_a_rank_says_which_worker_it_is(kind):
    from torch_overlay.integrations.vllm import name_worker

    error = kind("rank 3 didn't come: it is not in a run, for 9 s")
    name_worker(error, trainers=2)
    assert ("rank 3 of the place is vLLM's worker 1" in str(error)) == (kind is not KeyError)


class Routes(http.server.BaseHTTPRequestHandler):
    """A server that remembers what is posted, and refuses a route that it doesn't know."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        route = self.path.removeprefix("/")
        self.server.posted.append((route, body))
        self.send_response(404 if route.startswith("shutdown") else 200)
        self.end_headers()
        self.wfile.write(b"no such route")

    def log_message(self, *given):
        """Not to the terminal."""


def test_the_client_posts_what_vllms_routes_take():
    from torch_overlay.integrations.vllm.client import HTTPClient

    with http.server.HTTPServer(("127.0.0.1", 0), Routes) as server:
        server.posted = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = HTTPClient(f"http://127.0.0.1:{server.server_port}/", timeout=10)
        client.init_weight_transfer_engine({"workers": 2})
        client.start_weight_update()
        client.update_weights({"check": True})
        client.finish_weight_update()
        with pytest.raises(RuntimeError, match=r"/shutdown_weight_transfer_engine answered 404 .*: no such route"):
            client.shutdown_weight_transfer_engine()
        server.shutdown()
    assert server.posted == [
        ("init_weight_transfer_engine", {"init_info": {"workers": 2}}),
        ("start_weight_update", {"is_checkpoint_format": False}),
        ("update_weights", {"update_info": {"check": True}}),
        ("finish_weight_update", {}),
        ("shutdown_weight_transfer_engine", {}),
    ]
    with pytest.raises(OSError, match=r"http://127.0.0.1:\d+/start_weight_update: no answer within 0.\d s: .*refused"):
        client.start_weight_update()


def test_what_comes_whole_and_what_nothing_reaches_is_told_to_vllms_log(caplog):
    with installed([]), caplog.at_level(logging.INFO, "vllm"):
        model = Scaled()
        model.lost, model.more = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        engine, info = worker(model)
        engine._metas = info.metas
        engine._ask_loader()
        line, lost = caplog.records
        assert (line.name, line.levelname) == ("vllm.torch_overlay", "INFO")  # as much is direct as whole
        assert "1 of 2 tensors (16 bytes) go straight" in line.getMessage()
        assert lost.levelname == "WARNING" and "reaches 2 parameters: lost, more" in lost.getMessage()
        model.checkpoint = lambda: {"scaled": ((2, 2), False)}
        engine._metas = worker_info(model).metas
        engine._ask_loader()
        assert caplog.records[2].levelname == "WARNING"


def test_a_cpu_platform_that_packs_is_not_trusted():
    with installed([]):
        from torch_overlay.integrations.vllm.worker import lays_out_anew

        module = torch.nn.Linear(2, 2)
        module.quant_method = type("UnquantizedLinearMethod", (), {})()
        assert not lays_out_anew(module)
        module.cpu_linear = torch.nn.functional.linear
        assert lays_out_anew(module)


# --- what a worker compares


class Packed(torch.nn.Module):
    """A layer of which a server makes something: rows with padding that nothing writes, a scale, and a kernel."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.register_buffer("scale", torch.zeros(()))
        self.packed = torch.nn.Parameter(torch.empty(0), requires_grad=False)  # as the CPU platform leaves it
        self.came, self.turned, self.cache, self.factor = torch.randn(2, 2), None, torch.zeros(2), 0.0
        self.kernel = self.fails = None
        self.load()

    def load(self):
        others = [torch.empty(3, 2)]
        while (others[-1][2] == 7).any():  # memory that was just freed may hold what is served
            others.append(torch.empty(3, 2))
        made = others[-1]
        made[:2].copy_(self.came)
        self.weight.data.copy_(made)
        self.scale.fill_(self.came.abs().max())
        self.turned, self.factor = self.came.t().clone(), float(self.came[0, 0])
        if self.fails:
            self._parameters["weight"] = torch.nn.Parameter(torch.ones(1, device="meta"))
            raise ArithmeticError("load")

    def flip(self, name):
        if name == "factor":
            self.factor += 1
        else:
            tensor = getattr(self, name).data.view(torch.int32)
            tensor[(0,) * tensor.dim()] ^= 1


@pytest.mark.parametrize("name", ["weight", "scale", "turned", "factor"])
def test_what_the_loader_makes_is_compared_with_what_is_served(name):
    """And afterwards is as it was, right or wrong. Padding is neither: it's made of memory that nothing wrote."""
    from torch_overlay.integrations.vllm.verification import compare_with_step

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(Packed())
    layer = model[0]
    layer.weight.data[2] = 7  # as if this memory had held it
    assert not compare_with_step({"0": layer}, layer.load)[0]
    layer.flip(name)
    before = {key: getattr(layer, key) for key in ("weight", "scale", "turned", "factor")}
    values = {key: torch.as_tensor(value).clone() for key, value in before.items()}
    for _ in range(2):
        found, unseen = compare_with_step({"0": layer}, layer.load)
        assert [*found] == [f"0.{name}"]
        said = {
            "weight": r"differs in 1 of 6 elements of shape \(3, 2\), the first at \(0, 0\)",
            "scale": r"differs in 1 of 1 element of shape \(\), the first at \(\)",
            "turned": "differs in 1 of 4 elements",
            "factor": "2.54.* is served, and 1.54.* made",
        }
        assert re.match(said[name], found[f"0.{name}"])
        assert unseen == {"0.weight": "2 of 6 elements of shape (3, 2) are made of memory that nothing wrote"}
        for key, value in before.items():
            assert getattr(layer, key) is value
            assert torch.equal(torch.as_tensor(value).nan_to_num(), values[key].nan_to_num())


def test_what_can_not_be_compared_is_named():
    from torch_overlay.integrations.vllm.verification import compare_with_step

    layer = torch.nn.Linear(2, 2)
    before = layer.weight.clone(), layer.bias.clone()
    layer.kernel, layer.cache, layer.kept, layer.shape = object(), torch.zeros(2), torch.zeros(2), [1, 2]

    def step():
        layer.kernel, layer.shape = object(), [1, 2]
        layer.cache.fill_(1)
        layer.weight.data[0, :] = before[0][0]  # of the rest vLLM's reload may do nothing, without an error

    assert compare_with_step({"": layer}, step) == (
        {},
        {
            "kernel": "vLLM makes it anew whenever it loads, as an object (object)",
            "cache": "vLLM writes it in place, and it is no parameter or buffer",
            "weight": "2 of 4 elements of shape (2, 2) aren't written when vLLM loads, in a round neither",
            "bias": "2 of 2 elements of shape (2,) aren't written when vLLM loads, in a round neither",
        },
    )
    assert torch.equal(layer.weight, before[0]) and torch.equal(layer.bias, before[1])


def test_a_loader_that_fails_while_weights_are_compared_leaves_the_model_as_it_was():
    from torch_overlay.integrations.vllm.verification import compare_with_step

    layer = Packed()
    weight, values = layer.weight, layer.weight.clone()
    layer.fails, layer.came = True, torch.zeros(2, 2)
    with pytest.raises(ArithmeticError, match="load"):
        compare_with_step({"": layer}, layer.load)
    assert layer.weight is weight and torch.equal(weight.nan_to_num(), values.nan_to_num())


def test_a_worker_verifies_only_what_came_whole_to_where_it_is_now():
    """Before the first round, and where memory has moved since the last one, buffers have no values."""
    with installed([]):
        model = Scaled()
        model.lost = torch.nn.Parameter(torch.zeros(3))
        engine, info = worker(model)
        found = []
        with (
            by_hand(engine, info) as done,
            mock.patch("torch_overlay.integrations.vllm.worker.share_findings", lambda *given: found.append(given[2:])),
        ):
            engine._place = types.SimpleNamespace(rank=5)
            verify = lambda: engine.receive_weights(engine.update_info_cls(verify=True))
            verify()
            assert done.pop().startswith("refuse: what has to come whole isn't here before the first round: send the")
            engine.receive_weights(engine.update_info_cls())
            verify()
            assert found.pop() == ([], {"lost": "3 elements of it get nothing"})
            model.fails = "load"
            verify()
            assert found.pop() == (["rank 5 can't compare: RuntimeError: load"], {})
            assert (model.scaled.weight == 4).all()
            model.fails = None
            del done[:]
            model.cut.weight.data = model.cut.weight.data.clone()
            verify()
            assert re.match(
                "refuse: what has to come whole isn't here since 'cut.weight' of the model lies", done.pop()
            )
            engine.receive_weights(engine.update_info_cls())
            verify()
            assert done == ["bind", "run", "verify"] and len(found) == 1
