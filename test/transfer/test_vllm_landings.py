"""Where a model's loader puts tensors of a checkpoint, against the loader itself; on vLLM's own layers where it is."""

import math

import pytest
import torch

from torch_overlay.integrations.vllm.landings import Meta, landings
from vllm_stand_in import HAS_VLLM, SMALL, SPARSE, Model, Sizes

TYPE = torch.float32


def metas_of(shapes):
    return [Meta(name, TYPE, tuple(shape)) for name, shape in shapes.items()]


def values_of(shapes):
    return {
        name: torch.arange(1.0, 1 + math.prod(shape)).reshape(shape) + 1000 * number
        for number, (name, shape) in enumerate(shapes.items())
    }


def check(model, shapes):
    """What lands directly makes the model that its loader makes, bit by bit."""
    found = landings(model.load_weights, model, metas_of(shapes))
    params = dict(model.named_parameters())
    assert all(not param.any() for param in params.values()), "asking changed the model"
    values = values_of(shapes)
    for name, boxes in found.direct.items():
        for start, view in boxes:
            view.copy_(values[name][tuple(slice(at, at + n) for at, n in zip(start, view.shape))])
    got = {name: param.clone() for name, param in params.items()}
    for param in params.values():
        param.zero_()
    model.load_weights(values.items())
    for name, param in params.items():
        assert torch.equal(got[name], param), name
    return found


@pytest.mark.parametrize("sizes", [SMALL, SPARSE])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_gets_what_its_loader_would_cut(sizes, tp):
    for rank in range(tp):
        model = Model(sizes, tp, rank)
        shapes = {name: shape for name, (shape, _) in model.checkpoint().items()}
        found = check(model, shapes)
        assert not found.whole
        assert len(found.direct) >= len(shapes) - 2  # of a rank's part of the vocabulary there may be nothing


class Odd(torch.nn.Module):
    """A loader for each way to take a tensor."""

    def __init__(self):
        super().__init__()
        names = (
            "cast",
            "turned",
            "square",
            "twice",
            "negated",
            "gathered",
            "looked_at",
            "elsewhere",
            "refused",
            "flat",
        )
        for name in (*names, "one", "other", "beside"):
            self.add_module(name, torch.nn.Module())
            self.get_submodule(name).weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.cast.weight.data = self.cast.weight.data.bfloat16()
        self.beside.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.refuses = False

    def load_weights(self, weights):
        for name, loaded in weights:
            into = self.get_submodule(name.partition(".")[0]).weight.data
            if name == "cast":
                into.copy_(loaded.to(torch.bfloat16))
            elif name in ("turned", "square"):
                into.copy_(loaded.t().contiguous() if name == "square" else loaded.t())
            elif name == "twice":
                into[:2].copy_(loaded[2:])
                into[2:].copy_(loaded[:2])
            elif name == "negated":
                into.copy_(-loaded)
            elif name == "gathered":
                into.copy_(loaded[torch.tensor([3, 1, 2, 0])])
            elif name == "looked_at":
                assert not loaded.isnan().any()
            elif name == "elsewhere":
                torch.empty(4, 4).copy_(loaded)
            elif name == "flat":
                into.copy_(loaded.view(4, 4)) if loaded.shape == (2, 8) else into.copy_(loaded)
            elif name == "beside.bias":
                self.beside.bias.data.copy_(loaded.exp())
            elif name == "refused" and self.refuses:
                raise KeyError(name)
            elif name in ("one", "other"):
                self.one.weight.data.copy_(loaded)
            elif name == "beside":
                into.copy_(loaded)


WHOLE = {
    "negated": "its loader calls aten.neg.default",
    "gathered": "its loader calls aten.index.Tensor",
    "elsewhere": "its loader copies it to memory that isn't the model's",
    "flat": "its loader takes elements that make no box",
    "beside.bias": "its loader calls aten.exp.default",
    "beside": "another tensor of its module comes whole",
    "one": "another tensor goes to the same memory",
    "other": "another tensor goes to the same memory",
}


def shapes_of(model, *more):
    named = [name for name, _ in model.named_children() if name not in ("looked_at", "refused")]
    shapes = dict.fromkeys((*named, *more), (4, 4))
    return shapes | {"flat": (2, 8), "beside.bias": (4,)}


def test_what_is_more_than_a_cut_comes_whole():
    model = Odd()
    metas = metas_of(shapes_of(model))
    found = landings(model.load_weights, model, metas)
    assert found.whole == WHOLE
    assert set(found.direct) == {"cast", "turned", "square", "twice"}
    values = values_of(shapes_of(model))
    for name, boxes in found.direct.items():
        for start, view in boxes:
            view.copy_(values[name][tuple(slice(at, at + n) for at, n in zip(start, view.shape))])
    got = {name: model.get_submodule(name).weight.clone() for name in found.direct}
    model.load_weights([(name, values[name]) for name in found.direct])
    for name, weight in got.items():
        wanted = model.get_submodule(name).weight
        assert torch.allclose(weight, wanted, rtol=1e-2) and (name == "cast" or torch.equal(weight, wanted)), name


class Sly(torch.nn.Module):
    """Loaders that do more than they seem to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False) for _ in range(2))
        self.numbers = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
        self.kept = None

    def load_weights(self, weights):
        for name, loaded in weights:
            getattr(self, f"load_{name}")(self.a.data, loaded)

    def load_then_changed(self, a, w):
        a.copy_(w)
        a.copy_(-torch.exp(a))  # as composed loaders do

    def load_then_scaled(self, a, w):
        a.copy_(w)
        a.mul_(2)

    def load_then_cut(self, a, w):
        a.copy_(w)
        a[2:].zero_()

    def load_passed_on(self, a, w):
        a.copy_(w)
        self.b.data.copy_(a)

    def load_scaled_before(self, a, w):
        w.mul_(2)
        a.copy_(w)

    def load_copy_changed(self, a, w):
        w = w.clone()
        w += 1
        a.copy_(w)

    def load_row_moved(self, a, w):
        w[0] = w[1]
        a.copy_(w)

    def load_by_out(self, a, w):
        torch.mul(w, 2, out=w)
        a.copy_(w)

    def load_twice(self, a, w):
        a[:3].copy_(w[:3])
        a[1:].copy_(w[1:])

    def load_rounded(self, a, w):
        a.copy_(w.half())

    def load_truncated(self, a, w):
        a.copy_(w.to(torch.int32))

    def load_as_numbers(self, a, w):
        self.numbers.data.copy_(w)

    def load_as_bits(self, a, w):
        self.numbers.data.copy_(w.view(torch.int32))

    def load_kept(self, a, w):
        self.kept = w[1:]

    def load_put(self, a, w):
        self.a = torch.nn.Parameter(w, requires_grad=False)


@pytest.mark.parametrize("name", [name.removeprefix("load_") for name in vars(Sly) if name.startswith("load_")][1:])
def test_what_a_loader_changes_comes_whole(name):
    model = Sly()
    found = landings(model.load_weights, model, metas_of({name: (4, 4)}))
    assert not found.direct and set(found.whole) == {name}


def test_a_padded_row_may_be_filled_beside_what_lands():
    """But not what landed: the value there would be another one."""
    model = Sly()

    def load(weights, rows):
        for _, loaded in weights:
            model.a.data[:3].copy_(loaded)
            model.a.data[rows:].fill_(0)

    for rows, direct in ((3, True), (2, False)):
        found = landings(lambda weights, rows=rows: load(weights, rows), model, metas_of({"w": (3, 4)}))
        assert bool(found.direct) == direct


def test_places_that_overlap_come_whole_and_so_do_all_modules_concerned():
    model = torch.nn.ModuleDict({name: Sly() for name in ("one", "two", "three")})

    def load(weights):
        for name, loaded in weights:
            if name == "x":  # in two modules
                model.one.a.data.copy_(loaded)
                model.two.a.data.copy_(loaded)
            elif name == "y":
                model.one.b.data.copy_(loaded * 2)
            elif name == "z":
                model.two.b.data.copy_(loaded)
            elif name in ("top", "low"):
                model.three.a.data[slice(0, 3) if name == "top" else slice(2, 4)].copy_(loaded)
            else:  # columns beside one another share rows of memory, and no element
                model.three.b.data[:, slice(0, 2) if name == "left" else slice(2, 4)].copy_(loaded)

    shapes = {"x": (4, 4), "y": (4, 4), "z": (4, 4), "top": (3, 4), "low": (2, 4), "left": (4, 2), "right": (4, 2)}
    found = landings(load, model, metas_of({name: shapes[name] for name in ("left", "right")}))
    assert set(found.direct) == {"left", "right"}
    found = landings(load, model, metas_of(shapes))
    assert not found.direct and set(found.whole) == set(shapes)
    assert found.whole["top"] == "another tensor goes to the same memory"


@pytest.mark.parametrize("name", ["looked_at", "refused"])
def test_where_a_loader_refuses_all_come_whole(name):
    """Nobody knows what else of the model it would have changed."""
    model = Odd()
    model.refuses = True
    found = landings(model.load_weights, model, metas_of(shapes_of(model, name)))
    assert not found.direct and len(found.whole) == len(shapes_of(model, name))
    assert "its loader" in found.whole[name]


QWEN3 = {
    "8B": Sizes(hidden=4096, inner=12288, heads=32, kv=8, head=128, vocabulary=151936, layers=36, experts=0),
    "32B": Sizes(hidden=5120, inner=25600, heads=64, kv=8, head=128, vocabulary=151936, layers=64, experts=0),
    "30B-A3B": Sizes(hidden=2048, inner=768, heads=32, kv=4, head=128, vocabulary=151936, layers=48, experts=128),
}


@pytest.mark.parametrize("size, times", [("8B", 5.9), ("32B", 5.6), ("30B-A3B", 7.9)])
def test_bytes_into_workers_by_shapes(size, times):
    """At TP 8, beside what vLLM's m2n engine brings by its own rules: fused weights and embeddings whole to each."""
    sizes = Sizes(**{**vars(QWEN3[size]), "layers": 1})  # each layer has the same
    ours = theirs = 0
    for rank in range(8):
        model = Model(sizes, 8, rank, "meta")
        shapes = model.checkpoint()
        found = landings(model.load_weights, model, metas_of({name: shape for name, (shape, _) in shapes.items()}))
        assert not found.whole
        for name, (shape, whole) in shapes.items():
            many = 1 if name in ("embed", "head") else QWEN3[size].layers
            mine = sum([view.numel() for _, view in found.direct.get(name, ())])
            ours += many * mine
            theirs += many * (math.prod(shape) if whole else mine)
    assert theirs / ours == pytest.approx(times, abs=0.06)


# --- vLLM's own layers


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM isn't installed; tried with 0.33.0 without a GPU, see docs/vllm.md")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_of_vllm(tp, monkeypatch):
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.layers.vocab_parallel_embedding as vocabulary
    import vllm.model_executor.parameter as parameter
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    for rank in range(tp):
        for module in (linear, vocabulary, parameter):
            for name, value in (("world_size", tp), ("rank", rank)):
                if hasattr(module, f"get_tensor_model_parallel_{name}"):
                    monkeypatch.setattr(module, f"get_tensor_model_parallel_{name}", lambda value=value: value)
        model = torch.nn.Module()
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            model.qkv = linear.QKVParallelLinear(16, 4, 8, 2, bias=True, params_dtype=TYPE)
            model.gate_up = linear.MergedColumnParallelLinear(16, [32, 32], bias=False, params_dtype=TYPE)
            model.down = linear.RowParallelLinear(32, 16, bias=False, params_dtype=TYPE)
            model.embed = vocabulary.VocabParallelEmbedding(1001, 16, params_dtype=TYPE)
            model.head = vocabulary.ParallelLMHead(1001, 16, params_dtype=TYPE)
            model.gate = linear.ReplicatedLinear(16, 6, bias=False, params_dtype=TYPE)
        for param in model.parameters():
            param.data.zero_()
            param.requires_grad_(False)
        fused = {"q": ("qkv", "q"), "k": ("qkv", "k"), "v": ("qkv", "v"), "g": ("gate_up", 0), "u": ("gate_up", 1)}

        def load(weights, model=model, fused=fused):
            for name, loaded in weights:
                key, _, kind = name.partition(".")
                module, *shard = fused.get(key, (key,))
                param = getattr(getattr(model, module), kind)
                param.weight_loader(param, loaded, *shard)

        model.load_weights = load
        shapes = {"q.weight": (32, 16), "k.weight": (8, 16), "v.weight": (8, 16), "q.bias": (32,), "k.bias": (8,)}
        shapes |= {"v.bias": (8,), "g.weight": (32, 16), "u.weight": (32, 16), "down.weight": (16, 32)}
        shapes |= {"embed.weight": (1001, 16), "head.weight": (1001, 16), "gate.weight": (6, 16)}
        found = check(model, shapes)
        assert not found.whole and len(found.direct) == len(shapes)
