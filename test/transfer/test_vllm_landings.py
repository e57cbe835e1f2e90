"""Landings of models that cut as vLLM's do: bytes into workers, and vLLM's own layers where it is installed."""

import math

import pytest
import torch

from test_landings import TYPE, check, metas_of
from torch_overlay.loading.landings import find_landings
from vllm_stand_in import HAS_VLLM, Model, Sizes
from way import needs_package

pytestmark = needs_package
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
        found = find_landings(model.load_weights, model, metas_of({name: shape for name, (shape, _) in shapes.items()}))
        assert not found.whole
        for name, (shape, whole) in shapes.items():
            many = 1 if name in ("embed", "head") else QWEN3[size].layers
            mine = sum([piece._local_tensor.numel() for piece in found.direct.get(name, ())])
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

        shapes = {"q.weight": (32, 16), "k.weight": (8, 16), "v.weight": (8, 16), "q.bias": (32,), "k.bias": (8,)}
        shapes |= {"v.bias": (8,), "g.weight": (32, 16), "u.weight": (32, 16), "down.weight": (16, 32)}
        shapes |= {"embed.weight": (1001, 16), "head.weight": (1001, 16), "gate.weight": (6, 16)}
        found = check(model, load, shapes)
        assert not found.whole and len(found.direct) == len(shapes)
