"""What the engine for vLLM asks of vLLM 0.33, for machines without it: base classes and factories with the same
attributes, and layers whose loaders cut as vLLM's do, written anew. Where vLLM is installed, its own are used."""

import contextlib
import importlib.util
import sys
import types
import weakref
from dataclasses import dataclass, field
from typing import ClassVar
from unittest import mock

import torch

HAS_VLLM = importlib.util.find_spec("vllm") is not None


class Base:
    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def __class_getitem__(cls, _):
        return cls

    def update_weights(self, info):
        self.receive_weights(self.update_info_cls(**info))


class BaseTo26:
    """Of 0.24: the worker begins and ends the reload, around what it calls here."""

    def __init__(self, config, parallel_config, model):
        self.config, self.parallel_config, self.model = config, parallel_config, model

    __class_getitem__ = classmethod(lambda cls, _: cls)


def update_to_26(engine, is_checkpoint_format):
    """What a worker of 0.24 does in a round, as the client began it."""
    reload = sys.modules["vllm.model_executor.model_loader.reload"]
    if is_checkpoint_format:
        reload.initialize_layerwise_reload(engine.model)
    load = engine.model.load_weights if is_checkpoint_format else lambda weights: None
    engine.receive_weights(engine.update_info_cls(), load_weights=load)  # if it raises, the reload stays open
    if is_checkpoint_format:
        reload.finalize_layerwise_reload(engine.model, None)


class BaseTo20(BaseTo26):
    def __init__(self, config, parallel_config):
        pass


class TrainerBase:
    def __init__(self, *, client, source=None, is_sender=True, rank=0):
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    def __class_getitem__(cls, _):
        return cls


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self):
        return self.rank == 0


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple
    owners: tuple | None = None
    mesh_shape: tuple | None = None
    placements: tuple | None = None


class EplbState:
    @staticmethod
    def build_initial_global_physical_to_logical_map(num_routed_experts, num_redundant_experts):
        return [*range(num_routed_experts), *[at % num_routed_experts for at in range(num_redundant_experts)]]


@dataclass
class EplbModelState:
    physical_to_logical_map: torch.Tensor
    logical_to_physical_map: torch.Tensor
    model: torch.nn.Module
    rebalanced: bool
    pending_result: object | None = None


@dataclass
class EplbLayerState:
    logical_to_physical_map: torch.Tensor | None = None


EPLB = {"EplbState": EplbState, "EplbModelState": EplbModelState, "EplbLayerState": EplbLayerState}


class Factory:
    def __init__(self):
        self._registry = {}

    def register_engine(self, name, module, kind):
        assert name not in self._registry
        self._registry[name] = lambda: getattr(importlib.import_module(module), kind)


@contextlib.contextmanager
def installed(reloads, version="0.33", has_layouts=False):
    """A vLLM in sys.modules, with the base classes and factories of this version; no vLLM if that is None. What its
    layerwise reload is called with goes to `reloads`. With `has_layouts` it knows the layouts of its loader."""
    if HAS_VLLM and version == "0.33" and not has_layouts:
        import vllm.model_executor.model_loader.reload as its

        with (
            mock.patch.object(its, "initialize_layerwise_reload", lambda model: reloads.append("begun")),
            mock.patch.object(its, "finalize_layerwise_reload", lambda model, config: reloads.append("done")),
            mock.patch.object(torch.accelerator, "synchronize", lambda: None),
        ):
            yield
        return
    base = {
        "WeightTransferEngine": Base,
        "TrainerWeightTransferEngine": TrainerBase,
        "WeightTransferInitInfo": object,
        "WeightTransferUpdateInfo": object,
        "TrainerInitInfo": TrainerInitInfo,
        "Shard": Shard,
        "Replicate": Replicate,
        "ParamMeta": ParamMeta,
    }
    factories = {"WeightTransferEngineFactory": Factory(), "WeightTransferTrainerFactory": Factory()}
    if version == "0.27":  # to 0.32: a source says nothing of shards
        base = {name: kind for name, kind in base.items() if name not in ("Shard", "Replicate", "ParamMeta")}
    if version in ("0.20", "0.24"):  # the trainer calls a static method of the worker's class
        base = {name: kind for name, kind in base.items() if name.startswith("Weight")}
        base["WeightTransferEngine"] = BaseTo20 if version == "0.20" else BaseTo26
        del factories["WeightTransferTrainerFactory"]
    reload = {
        "initialize_layerwise_reload": lambda model: reloads.append("begun"),
        "finalize_layerwise_reload": lambda model, config: reloads.append("done"),
    }
    modules = {"vllm": {}, "vllm.distributed": {}, "vllm.model_executor": {}, "vllm.model_executor.model_loader": {}}
    modules |= {"vllm.distributed.weight_transfer": {}, "vllm.distributed.weight_transfer.base": base}
    modules |= {"vllm.distributed.eplb": {}, "vllm.distributed.eplb.eplb_state": EPLB}
    modules |= {
        "vllm.distributed.weight_transfer.factory": factories,
        "vllm.model_executor.model_loader.reload": reload,
    }
    if has_layouts:
        modules |= {f"vllm.model_executor.model_loader.reload.{name}": RELOAD for name in ("layerwise", "meta")}
    made = {} if version else {"vllm": None}  # None: an import of it raises
    for name, content in modules.items() if version else ():
        made[name] = types.ModuleType(name)
        vars(made[name]).update(content)
    # Not by mock.patch.dict, which forgets all that is imported meanwhile: parts of torch can't be imported twice.
    before = {name: module for name, module in sys.modules.items() if _is_concerned(name)}
    try:
        _replace_modules(made)
        yield
    finally:
        _replace_modules(before)


def _is_concerned(name):
    return name.partition(".")[0] == "vllm" or name.startswith("torch_overlay.integrations")


def _replace_modules(modules):
    for name in [*filter(_is_concerned, sys.modules)]:
        del sys.modules[name]
    sys.modules.update(modules)


# --- layers that are served in another layout than they are loaded in


class LayerInfo:
    def __init__(self):
        self.restore_metadata, self.kernel_tensors = ({}, {}), None

    def reset(self):
        self.kernel_tensors = None


INFOS = weakref.WeakKeyDictionary()


def on_meta(tensor):
    made = tensor.data.to("meta")
    made.__class__, made.__dict__ = type(tensor), dict(tensor.__dict__)
    return made


def restore(layer, info):
    layer._parameters.clear()
    layer._parameters.update(info.restore_metadata[0])


def process(layer, info):
    layer.quant_method.process_weights_after_loading(layer)
    for name, tensor in info.kernel_tensors[0].items():
        tensor.data.copy_(getattr(layer, name))
    layer._parameters.clear()
    layer._parameters.update(info.kernel_tensors[0])


RELOAD = {
    "get_layerwise_info": lambda layer: INFOS.setdefault(layer, LayerInfo()),
    "_layerwise_process": process,
    "_get_original_loader": lambda tensor: tensor.weight_loader,
    "is_deferred_attention_layer": lambda layer: False,
    "restore_layer_on_meta": restore,
    "to_meta_tensor": on_meta,
}


class Quantized:
    """Serves whole numbers and a scale for each row, columns first; `fails` if somebody says so."""

    fails = False

    def process_weights_after_loading(self, layer):
        if Quantized.fails:
            raise ArithmeticError("no scale fits")
        for name, param in [*layer._parameters.items()]:
            scale = param.detach().float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
            layer._parameters[name] = torch.nn.Parameter(
                (param.detach() / scale).round().to(torch.int8).transpose(-1, -2).contiguous(), requires_grad=False
            )
            layer.register_parameter(f"{name}_scale", torch.nn.Parameter(scale, requires_grad=False))


def as_served(model):
    """Note the loader's layouts, and quantize all layers but the norms, as vLLM does when it has loaded a model."""
    for layer in [layer for layer in model.children() if not hasattr(layer, "dim") or layer.weight.dim() > 1]:
        info = INFOS.setdefault(layer, LayerInfo())
        info.restore_metadata = {name: on_meta(param) for name, param in layer._parameters.items()}, {}
        layer.quant_method = Quantized()
        layer.quant_method.process_weights_after_loading(layer)


# --- a model whose layers are cut over `tp` ranks, and the loaders that cut


def parameter(loader, *shape, device="cpu"):
    param = torch.nn.Parameter(torch.zeros(shape, device=device), requires_grad=False)
    param.weight_loader = loader
    return param


class Cut(torch.nn.Module):
    """A linear layer cut along a dim; the whole if the dim is None."""

    def __init__(self, shape, dim, tp, rank, device):
        super().__init__()
        self.dim, self.rank, local = dim, rank, list(shape)
        if dim is not None:
            local[dim] //= tp
        self.weight = parameter(self.load, *local, device=device)

    def load(self, param, loaded, _=None):
        if self.dim is not None:
            size = param.shape[self.dim]
            loaded = loaded.narrow(self.dim, self.rank * size, size)
        param.data.copy_(loaded)


class Fused(torch.nn.Module):
    """Parts of several checkpoint tensors one below the other; of the later ones, groups of ranks have the same."""

    def __init__(self, rows, columns, tp, rank, device):
        super().__init__()
        self.parts, self.rank, at = {}, rank, 0
        for key, (count, heads) in rows.items():
            shared = max(tp // heads, 1)
            size = count * shared // tp
            self.parts[key] = at, size, rank // shared
            at += size
        self.weight = parameter(self.load, at, columns, device=device)

    def load(self, param, loaded, key):
        at, size, part = self.parts[key]
        param.data.narrow(0, at, size).copy_(loaded.narrow(0, part * size, size))


class Vocabulary(torch.nn.Module):
    """An embedding with rows that no checkpoint has, up to a multiple of 64, which are filled with zeros."""

    def __init__(self, rows, columns, tp, rank, device):
        super().__init__()
        size = -(-rows // 64) * 64 // tp
        self.start, self.end = rank * size, min((rank + 1) * size, rows)
        self.weight = parameter(self.load, size, columns, device=device)

    def load(self, param, loaded, _=None):
        loaded = loaded.narrow(0, self.start, max(self.end - self.start, 0))
        param[: loaded.shape[0]].data.copy_(loaded)
        param[loaded.shape[0] :].data.fill_(0)


class Experts(torch.nn.Module):
    """Gate and up of each expert in one tensor, down in another."""

    def __init__(self, experts, hidden, inner, tp, rank, device):
        super().__init__()
        self.rank, size = rank, inner // tp
        self.w13 = parameter(self.load, experts, 2 * size, hidden, device=device)
        self.w2 = parameter(self.load, experts, hidden, size, device=device)

    def load(self, param, loaded, key):
        number, part = key
        row = param.data[number]
        size = row.shape[1] if part == "down" else row.shape[0] // 2
        if part == "down":
            row.copy_(loaded.narrow(1, self.rank * size, size))
        else:
            row.narrow(0, size * (part == "up"), size).copy_(loaded.narrow(0, self.rank * size, size))


class Sizes(types.SimpleNamespace):
    """Of a model: hidden, inner, heads, kv, head, vocabulary, layers, experts."""


class Model(torch.nn.Module):
    """A decoder: what a checkpoint calls q, k, v is fused here, and so are gate and up, and experts."""

    def __init__(self, sizes, tp, rank, device="cpu"):
        super().__init__()
        self.sizes, more, s = sizes, (tp, rank, device), sizes
        self.embed, self.head = (Vocabulary(s.vocabulary, s.hidden, *more) for _ in range(2))
        q, kv = s.heads * s.head, s.kv * s.head
        for layer in range(s.layers):
            rows = {"q": (q, s.heads), "k": (kv, s.kv), "v": (kv, s.kv)}
            self.add_module(f"qkv{layer}", Fused(rows, s.hidden, *more))
            self.add_module(f"o{layer}", Cut((s.hidden, q), 1, *more))
            self.add_module(f"norm{layer}", Cut((s.hidden,), None, *more))
            if s.experts:
                self.add_module(f"experts{layer}", Experts(s.experts, s.hidden, s.inner, *more))
            else:
                pair = {"gate": (s.inner, s.inner), "up": (s.inner, s.inner)}
                self.add_module(f"gate_up{layer}", Fused(pair, s.hidden, *more))
                self.add_module(f"down{layer}", Cut((s.hidden, s.inner), 1, *more))

    def checkpoint(self):
        """Name and shape of each tensor, and whether vLLM's m2n engine sends it whole to each worker."""
        s, found = self.sizes, {}
        q, kv = s.heads * s.head, s.kv * s.head
        found["embed"] = found["head"] = (s.vocabulary, s.hidden), True
        for layer in range(s.layers):
            found |= {f"{layer}.{key}": ((rows, s.hidden), True) for key, rows in (("q", q), ("k", kv), ("v", kv))}
            found |= {f"{layer}.o": ((s.hidden, q), False), f"{layer}.norm": ((s.hidden,), False)}
            for expert in range(s.experts) or ("",):
                found |= {f"{layer}.{key}{expert}": ((s.inner, s.hidden), True) for key in ("gate", "up")}
                found[f"{layer}.down{expert}"] = (s.hidden, s.inner), bool(s.experts)
        return found

    def load_weights(self, weights):
        for name, loaded in weights:
            layer, _, key = name.rpartition(".")
            kind = key.rstrip("0123456789")
            if self.sizes.experts and kind in ("gate", "up", "down"):
                param, shard = getattr(self, f"experts{layer}"), (int(key[len(kind) :]), kind)
                param = param.w2 if kind == "down" else param.w13
            else:
                module = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(kind, kind)
                param, shard = getattr(self, f"{module}{layer}").weight, kind
            param.weight_loader(param, loaded, shard)


SMALL = Sizes(hidden=12, inner=16, heads=8, kv=2, head=2, vocabulary=150, layers=2, experts=0)
SPARSE = Sizes(**{**vars(SMALL), "experts": 3})


# --- experts that vLLM moves


class RoutedExperts(torch.nn.Module):
    """The slots of one worker. The loader takes the number of a slot among all workers'."""

    def __init__(self, physical, hidden, inner, ep, rank):
        super().__init__()
        many = self.local_num_experts = physical // ep
        slots = torch.full((physical,), -1)
        slots[rank * many : (rank + 1) * many] = torch.arange(many)
        self.expert_map_manager = types.SimpleNamespace(expert_map=slots, num_fused_shared_experts=0)
        self.w13_weight = parameter(self.weight_loader, many, 2 * inner, hidden)
        self.w2_weight = parameter(self.weight_loader, many, hidden, inner)

    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        at = int(self.expert_map_manager.expert_map[expert_id])
        if at >= 0:
            row = param.data[at]
            row = row if shard_id == "w2" else row.chunk(2)[shard_id == "w3"]
            row.copy_(loaded_weight)
        return (at >= 0) if return_success else None

    def get_expert_weights(self):
        return [param.view(self.local_num_experts, -1) for param in self.parameters()]


class MoERunner(torch.nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.routed_experts, self.eplb_state = RoutedExperts(*sizes), EplbLayerState()


class Balanced(torch.nn.Module):
    """Layers of experts, of which some have copies, on `ep` workers, and a norm; with vLLM's state as `state`."""

    def __init__(self, ep, rank, experts=4, copies=4, layers=2, hidden=4, inner=3):
        super().__init__()
        self.sizes = types.SimpleNamespace(layers=layers, hidden=hidden, inner=inner)
        self.num_logical_experts = experts
        self.norm = torch.nn.Parameter(torch.zeros(hidden), requires_grad=False)
        self.moe_layers = torch.nn.ModuleList(
            [MoERunner(experts + copies, hidden, inner, ep, rank) for _ in range(layers)]
        )
        self.expert_weights = [layer.routed_experts.get_expert_weights() for layer in self.moe_layers]
        self.first = EplbState.build_initial_global_physical_to_logical_map(experts, copies)
        self.state = None

    def balance(self):
        """Make vLLM's state, as a server does when the model is loaded. To be called within `installed`."""
        kinds = importlib.import_module("vllm.distributed.eplb.eplb_state")
        slots, layers = len(self.first), self.sizes.layers
        routes = torch.full((layers, self.num_logical_experts, slots), -1)
        self.state = kinds.EplbModelState(torch.zeros(layers, slots, dtype=torch.long), routes, self, False)
        for layer, its in zip(self.moe_layers, routes):
            layer.eplb_state.logical_to_physical_map = its
        self.rebalance([self.first] * layers)

    def rebalance(self, rows):
        """Write another map. Doesn't move weights."""
        self.state.physical_to_logical_map.copy_(torch.tensor(rows))
        self.state.logical_to_physical_map.fill_(-1)
        for layer, row in enumerate(rows):
            for slot, expert in enumerate(row):
                routes = self.state.logical_to_physical_map[layer, expert]
                routes[int((routes >= 0).sum())] = slot

    def checkpoint(self):
        s, found = self.sizes, {"norm": ((self.sizes.hidden,), False)}
        for layer in range(s.layers):
            for expert in range(self.num_logical_experts):
                for key in ("w1", "w3", "w2"):
                    shape = (s.hidden, s.inner) if key == "w2" else (s.inner, s.hidden)
                    found[f"{layer}.experts.{expert}.{key}"] = shape, True
        return found

    def load_weights(self, weights):
        for name, loaded in weights:
            layer, _, rest = name.partition(".experts.")
            if not rest:
                self.norm.data.copy_(loaded)
                continue
            expert, key = rest.split(".")
            module = self.moe_layers[int(layer)].routed_experts
            param = module.w2_weight if key == "w2" else module.w13_weight
            for slot in [slot for slot, its in enumerate(self.first) if its == int(expert)]:
                if param.weight_loader(param, loaded, name, shard_id=key, expert_id=slot, return_success=True):
                    break  # as Mixtral's: a copy on the same worker is left out


def slots_as_mapped(model, weights, rank, many):
    """For each slot of a worker what it holds, and what it has to by vLLM's map, from a checkpoint's tensors."""
    for layer, row in enumerate(model.state.physical_to_logical_map.tolist()):
        module = model.moe_layers[layer].routed_experts
        for at, expert in enumerate(row[rank * many : (rank + 1) * many]):
            w1, w3, w2 = (weights[f"{layer}.experts.{expert}.{key}"] for key in ("w1", "w3", "w2"))
            yield module.w13_weight[at], torch.cat([w1, w3])
            yield module.w2_weight[at], w2
